#include "selection.h"

#include <algorithm>
#include <cmath>

namespace folio {
namespace {

constexpr int BUCKETS = 256;

// Even steps from `high` down to `low`. In double, so that the two fall into different buckets however near they are.
class Buckets {
public:
    Buckets(float low, float high) : high_(double(high)), scale_((BUCKETS - 1) / (high_ - double(low))) {}
    int of(float value) const { return std::min(int((high_ - double(value)) * scale_), BUCKETS - 1); }

private:
    double high_, scale_;
};

}  // namespace

float reaching(float* values, float* weights, int64_t count, double wanted, float low, float high) {
    double above = 0;  // what those weigh that are larger than all that are left
    // Each round leaves one bucket of the last one's, whose two ends then fall into different ones: it ends.
    while (low < high) {
        Buckets buckets(low, high);
        double held[BUCKETS] = {};
        for (int64_t i = 0; i < count; i++) held[buckets.of(values[i])] += weights ? double(weights[i]) : 1.0;
        int chosen = -1;
        double before = 0;
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            if (held[bucket] == 0) continue;
            chosen = bucket, before = above;
            above += held[bucket];
            if (above >= wanted) break;
        }
        above = before;
        int64_t kept = 0;
        float least = INFINITY, most = -INFINITY;
        for (int64_t i = 0; i < count; i++) {
            if (buckets.of(values[i]) != chosen) continue;
            least = std::min(least, values[i]), most = std::max(most, values[i]);
            values[kept] = values[i];
            if (weights) weights[kept] = weights[i];
            kept++;
        }
        count = kept, low = least, high = most;
    }
    return low;
}

}  // namespace folio
