// What Python calls: a step of a whole model, the output head, packing of weights.
#include <algorithm>
#include <chrono>
#include <vector>

#include "abi.h"
#include "activations.h"
#include "buffers.h"
#include "draw.h"
#include "forward.h"
#include "guarded.h"
#include "linear.h"
#include "lora.h"
#include "pool.h"
#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

// A linear over rows of floats, and what an adapter adds to it.
class Product {
public:
    Product(const FolioLinear& weights, const float* x, int64_t rows, bool deterministic, const FolioLora* lora,
            int64_t index)
        : weights_(weights), x_(x), rows_(rows), index_(index), activations_(buffers().activations[0]),
          by_adapter_(buffers().tokens) {
        one_order = deterministic;
        if (lora) {
            by_adapter_.make(*lora, lora->slots, rows, lora_width(*lora, lora->slots, rows, index + 1));
            if (by_adapter_.uses(index)) addition_ = {&by_adapter_, index};
        }
        activations_.shape(weights, rows, addition_.rows != nullptr);
        for (int64_t i = 0; i < weights.num_parts; i++) width_ += weights.parts[i].n;
    }

    int64_t width() const { return width_; }

    // All threads of the team, which meet at its end: into y [rows, width], `stride` from row to row.
    void run(Team& team, int thread, float* y, int64_t stride) {
        int64_t begin, end;
        int64_t together = activations_.together;
        while (team.take((rows_ + together - 1) / together, 1, begin, end))
            for (int64_t r = begin * together; r < std::min(end * together, rows_); r++)
                activations_.set(r, x_ + r * activations_.k);
        team.barrier();
        if (addition_.rows) {
            by_adapter_.shrink(team, index_, activations_);
            team.barrier();
        }
        linear(team, thread, weights_, activations_, rows_, y, stride, Into::store, addition_);
        team.barrier();
    }

private:
    const FolioLinear& weights_;
    const float* x_;
    int64_t rows_, index_, width_ = 0;
    Activations& activations_;
    LoraRows& by_adapter_;
    LoraAddition addition_;
};

constexpr size_t MOST_KEPT = size_t(4) << 20;  // floats that stay allocated for the products of the next call

}  // namespace
}  // namespace folio

#pragma GCC visibility push(default)
extern "C" {

// Sizes of the structures, so that a binding of another version is noticed.
void folio_sizes(int64_t* sizes) {
    sizes[0] = sizeof(FolioWeight), sizes[1] = sizeof(FolioLinear), sizes[2] = sizeof(FolioLayer);
    sizes[3] = sizeof(FolioModel), sizes[4] = sizeof(FolioGroup), sizes[5] = sizeof(FolioStep);
    sizes[6] = sizeof(FolioLoraLinear), sizes[7] = sizeof(FolioLora);
}

const char* folio_isa() { return FOLIO_ISA; }

const char* folio_error() { return folio::last_error.c_str(); }

int64_t folio_packed_bytes(int64_t format, int64_t n, int64_t k) { return folio::packed_bytes(format, n, k); }

void folio_pack_floats(int64_t format, int64_t n, int64_t k, const float* rows, uint8_t* packed) {
    folio::pack_floats(format, n, k, rows, packed);
}

// 0, or 1 where the type has no such format.
int64_t folio_pack_ggml(int64_t type, int64_t format, int64_t n, int64_t k, const uint8_t* rows, uint8_t* packed) {
    return folio::pack_ggml(type, format, n, k, rows, packed) ? 0 : 1;
}

void folio_unpack_row(const FolioWeight* weight, int64_t row, float* out) { folio::unpack_row(*weight, row, out); }

// A step of a model: 0, or 1 with folio_error saying why.
int64_t folio_forward(const FolioModel* model, const FolioStep* step) {
    return folio::guarded([&] {
        std::lock_guard<std::mutex> held(folio::call_mutex());
        folio::forward(*model, *step);
    });
}

// y [rows, n] = x [rows, k] · Wᵀ + b, and what linear `index` of the adapters adds, where `lora` is given.
// `deterministic`: as a step's.
int64_t folio_linear(const FolioLinear* linear, const float* x, int64_t rows, float* y, int64_t threads,
                     int64_t deterministic, const FolioLora* lora, int64_t index) {
    return folio::guarded([&] {
        std::lock_guard<std::mutex> held(folio::call_mutex());
        folio::Product product(*linear, x, rows, deterministic != 0, lora, index);
        folio::run_team(int(threads), [&](folio::Team& team, int thread) { product.run(team, thread, y, product.width()); });
    });
}

// Of each row of x [rows, k] · Wᵀ + b the largest value and the least index that has it; NaN where the row has one.
int64_t folio_likeliest(const FolioLinear* linear, const float* x, int64_t rows, int64_t threads, int64_t deterministic,
                        float* best, int64_t* index) {
    return folio::guarded([&] {
        std::lock_guard<std::mutex> held(folio::call_mutex());
        folio::Product product(*linear, x, rows, deterministic != 0, nullptr, 0);
        auto& scratch = folio::buffers();
        // Whole lines, an odd number: where rows are a multiple of 4 KiB apart, as vocabularies are, they share lines' places
        // in a cache, and are driven out of it.
        int64_t stride = (product.width() / 16 | 1) * 16 + 32;
        folio::grow(scratch.products, rows * stride);
        folio::choose_from(scratch.products.data(), rows, product.width(), stride, nullptr, threads);
        folio::run_team(int(threads), [&](folio::Team& team, int thread) {
            product.run(team, thread, scratch.products.data(), stride);
            folio::choose(team, thread, best, index);
        });
        if (scratch.products.size() > folio::MOST_KEPT) folio::Aligned<float>().swap(scratch.products);
    });
}

// Bytes a second that `threads` threads read from `data`, `size` bytes once, each of them from `streams` places at once: a
// CPU that fetches ahead within a page only waits less at their beginnings.
double folio_read_rate(const uint8_t* data, int64_t size, int64_t threads, int64_t streams) {
    std::lock_guard<std::mutex> held(folio::call_mutex());
    static volatile float sink [[maybe_unused]];
    constexpr int64_t PIECE = 1 << 18;
    auto began = std::chrono::steady_clock::now();
    folio::run_team(int(threads), [&](folio::Team& team, int) {
        int64_t stream = PIECE / 4 / streams, begin, end;
        folio::vf sums[4] = {folio::vzero(), folio::vzero(), folio::vzero(), folio::vzero()};
        while (team.take(size / PIECE, 1, begin, end)) {
            const float* at = reinterpret_cast<const float*>(data + begin * PIECE);
            for (int64_t i = 0; i + 4 * folio::LANES <= stream; i += 4 * folio::LANES)
                for (int64_t s = 0; s < streams; s++)
                    for (int j = 0; j < 4; j++)
                        sums[j] = folio::vmax(sums[j], folio::vload(at + s * stream + i + j * folio::LANES));
        }
        sink = folio::vsum(folio::vadd(folio::vadd(sums[0], sums[1]), folio::vadd(sums[2], sums[3])));
        team.barrier();
    });
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return double(size / PIECE * PIECE) / seconds;
}

}  // extern "C"
#pragma GCC visibility pop
