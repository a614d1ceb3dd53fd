// Activations that stand out of their row, times their columns of weights as they are stored.
#pragma once

#include <cstdint>

#include "abi.h"
#include "activations.h"

namespace folio {

// out [rows][PANEL] += the outliers of rows `first … first + rows` of x times a panel.
void add_outliers(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, float* out);

}  // namespace folio
