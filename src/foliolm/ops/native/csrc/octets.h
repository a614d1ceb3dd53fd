// 4-bit weights as 8-bit ones, for many rows: a scale for WIDE of them, as their activations have, instead of one a block.
#pragma once

#include <cstdint>

#include "abi.h"
#include "activations.h"
#include "aligned.h"
#include "outliers.h"

namespace folio {

// Rows from which on that pays, where it does at all: what it costs to make a panel's bytes is then less than what its
// products save. Below, and where a row's result must not depend on how many there are, weights are multiplied as stored.
constexpr int64_t OCTET_ROWS = 48;
// Rows and panels that are multiplied at once: each four of a row's activations are loaded once for both panels.
constexpr int64_t OCTET_TILE = ROWS / 2, OCTET_PANELS = 2;

// Whether so many rows are multiplied with bytes of a linear's weights.
bool in_octets(const FolioLinear& linear, int64_t rows);

// A panel's bytes: w = scale · (byte − 128), rounded: 1/254 of the WIDE weights' largest at most is lost.
void make_octets(const FolioWeight& weight, int64_t panel, Aligned<uint8_t>& octets);

// A panel's bytes, its columns where something stands out, and where its sums go [rows][PANEL].
struct OctetPanel {
    const uint8_t* octets;
    const float* columns;
    float* out;
};

// Rows `first … first + rows` of x, of a tile's first or second half, times some panels.
void multiply_octets(const OctetPanel* panels, int64_t count, const Activations& x, const TileOutliers& outliers,
                     int64_t first, int64_t rows);

}  // namespace folio
