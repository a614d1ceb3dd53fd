// Memory that calls share and keep: fresh memory would cost a page fault every 4 KiB.
#pragma once

#include <cstdint>
#include <vector>

#include "activations.h"
#include "aligned.h"
#include "attention.h"
#include "lora.h"
#include "lots.h"
#include "pool.h"

namespace folio {

struct Buffers {
    Aligned<float> x, qkv, attended, activated, angles;
    Activations activations[2];  // of a product, and of the one after it
    Lots lots;
    std::vector<AttentionPlan> plans;
    LoraRows tokens, outputs;     // by adapter: the step's tokens, and those that come out of the last layer
    Aligned<float> products;      // of folio_likeliest

    // What a thread has for itself.
    struct alignas(64) Thread {
        Aligned<float> line, rows;  // a row; those of a lot, between one product and the next
        Activations activations;
        Lines coming;  // the weights that it reads next
    };
    std::vector<Thread> threads;
};

inline Buffers& buffers() {
    static Buffers* the_buffers = new Buffers;
    return *the_buffers;
}

inline void grow(Aligned<float>& vector, int64_t size) {
    if (int64_t(vector.size()) < size) vector.resize(size_t(size));
}

}  // namespace folio
