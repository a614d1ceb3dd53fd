#include "pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "rotation.h"

namespace folio {
namespace {

// Memory for one vector: on the stack, but for very long ones. A library's thread_local costs a call each time.
template <class T>
class Line {
public:
    explicit Line(int64_t size) {
        if (size > SHORT) long_.resize(size_t(size));
    }
    T* data() { return long_.empty() ? short_ : long_.data(); }

private:
    static constexpr int64_t SHORT = 256;
    alignas(64) T short_[SHORT];
    std::vector<T> long_;
};

// A vector turned and rounded to [dim] signed bytes; returns their scale.
float to_bytes(const float* from, int64_t dim, int8_t* to) {
    Line<float> turned(dim);
    float* all = turned.data();
    hadamard(from, dim, all);
    int64_t i = 0;
    vf tops = vzero();
    for (; i + LANES <= dim; i += LANES) tops = vmax(tops, vabs(vload(all + i)));
    float top = vtop(tops);
    for (; i < dim; i++) top = std::max(top, std::fabs(all[i]));
    if (top < 1e-30f) top = 0;  // next to nothing is none: the inverse would overflow
    float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (i = 0; i + LANES <= dim; i += LANES) vstore_s8(to + i, vround(vmul(vload(all + i), vset(inverse))));
    for (; i < dim; i++) to[i] = int8_t(std::nearbyint(all[i] * inverse));
    return top / 127.0f;
}

void write_row(uint8_t* to, int64_t format, int64_t dim, const float* from) {
    if (format == FOLIO_KV_F32) {
        std::memcpy(to, from, size_t(dim) * 4);
    } else if (format == FOLIO_KV_BF16) {
        for (int64_t i = 0; i < dim; i++) {
            uint16_t half = float_to_bf16(from[i]);
            std::memcpy(to + 2 * i, &half, 2);
        }
    } else {
        float scale = to_bytes(from, dim, reinterpret_cast<int8_t*>(to));
        std::memcpy(to + dim, &scale, 4);
    }
}

}  // namespace

void Pages::write(int64_t slot, int64_t head, const float* key, const float* value) const {
    uint8_t *to_key = keys + offset(slot, head), *to_value = values + offset(slot, head);
    if (!in_panels()) {
        write_row(to_key, format, head_dim, key);
        write_row(to_value, format, head_dim, value);
        return;
    }
    Line<int8_t> line(head_dim);
    int8_t* row = line.data();
    int64_t token = slot % PANEL, scales = head_dim * PANEL + token * 4;
    float scale = to_bytes(key, head_dim, row);
    for (int64_t i = 0; i < head_dim; i += 4) std::memcpy(to_key + key_place(token, i), row + i, 4);
    std::memcpy(to_key + scales, &scale, 4);
    scale = to_bytes(value, head_dim, row);
    // Byte by byte: those between are other tokens', which other threads may be writing.
    for (int64_t first = 0; first < head_dim; first += PANEL) {
        uint8_t* to = to_value + value_place(token, first);
        FOLIO_UNROLL
        for (int64_t i = 0; i < PANEL; i++) to[i * 4] = uint8_t(row[first + i]);
    }
    std::memcpy(to_value + scales, &scale, 4);
}

}  // namespace folio
