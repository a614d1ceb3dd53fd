// The value at which the largest of some values reach a weight, found without sorting them.
#pragma once

#include <cstdint>

namespace folio {

// The largest of `values` [count >= 1] such that those not below it weigh at least `wanted` together; the least of all
// where rounding keeps them from it. All lie between `low` and `high`, which are finite. `weights` are above 0; null: each
// is 1. Both arrays are left in another order, in part.
float reaching(float* values, float* weights, int64_t count, double wanted, float low, float high);

}  // namespace folio
