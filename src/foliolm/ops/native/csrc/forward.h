// A step of a whole model.
#pragma once

#include "abi.h"

namespace folio {

// From tokens to the hidden states of those that are wanted; keys and values go to their blocks. The caller holds `call_mutex`.
void forward(const FolioModel& model, const FolioStep& step);

}  // namespace folio
