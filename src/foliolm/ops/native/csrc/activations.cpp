#include "activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "rotation.h"
#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

// A value of so many times its row's root mean square stands out: its group gets 16 bits, since 8 would leave too little
// of what lies beside it. (SmolLM2-135M: with 12, KL to float32 0.0018; with 22, 0.0029, and no faster.)
constexpr float OUTLIER = 12.0f;

}  // namespace

Forms forms_of(const FolioLinear& linear) {
    Forms forms;
    for (int64_t i = 0; i < linear.num_parts; i++) {
        int64_t format = linear.parts[i].format;
        if (format == FOLIO_F32) forms.f32 = true;
        if (format == FOLIO_BF16) forms.bf16 = true;
        if (format == FOLIO_I8) forms.rotated = true;
        if (format == FOLIO_Q8_0) forms.s16 = true;
        if (format == FOLIO_Q4_0 || format == FOLIO_Q4_1) forms.s8 = true;
    }
    return forms;
}

void Activations::shape(const FolioLinear& linear, int64_t rows, bool floats) {
    k = linear.parts[0].k;
    groups = (k + GROUP - 1) / GROUP;
    padded = groups * GROUP;
    forms = forms_of(linear);
    if (forms.bf16 && !in_pairs(rows)) forms.bf16 = false, forms.f32 = true;
    if (floats) forms.f32 = true;
    auto grow = [](auto& vector, int64_t size) {
        if (int64_t(vector.size()) < size) vector.resize(size_t(size));
    };
    together = forms.s8 && rows > FEW ? ROWS : 1;
    if (forms.f32) grow(f32, rows * k);
    if (forms.bf16) grow(bf16, rows * padded);
    if (forms.s8) {
        int64_t whole = (rows + together - 1) / together * together;
        for (auto* each : {&s8, &rest})
            grow(each->x, whole * padded), grow(each->scale, whole * groups), grow(each->sum, whole * groups);
        grow(fine, rows * words());
    }
    for (auto [wanted, shorts] : {std::pair{forms.s16, &s16}, {forms.rotated, &rotated}})
        if (wanted) grow(shorts->x, rows * padded), grow(shorts->scale, rows);
    // The sum of k products with weights of at most 127 must fit in 32 bits.
    s16_top = std::min<int64_t>(32767, ((int64_t(1) << 31) - 1) / (127 * padded));
}

void Activations::set(int64_t row, const float* x) {
    if (forms.f32) std::memcpy(f32.data() + row * k, x, size_t(k) * 4);
    if (forms.bf16) {
        uint16_t* to = bf16.data() + row * padded;
        int64_t i = 0;
        for (; i + LANES <= k; i += LANES) vstore_bf16(to + i, vload(x + i));
        for (; i < padded; i++) to[i] = i < k ? float_to_bf16(x[i]) : uint16_t(0);
    }
    if (forms.s16) set_s16(s16, row, x);
    if (forms.rotated) {
        thread_local std::vector<float> line;
        if (int64_t(line.size()) < k) line.resize(size_t(k));
        hadamard(x, k, line.data());
        set_s16(rotated, row, line.data());
    }
    if (forms.s8) set_s8(row, x);
}

void Activations::set_s16(Shorts& shorts, int64_t row, const float* x) {
    int16_t* to = shorts.x.data() + row * padded;
    vf tops = vzero(), zeros = vzero();  // a value that is not finite times 0 is NaN; no maximum is sure to keep one
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) tops = vmax(tops, vabs(vload(x + i))), zeros = vfma(vload(x + i), vzero(), zeros);
    float top = vtop(tops), zero = vsum(zeros);
    for (; i < k; i++) top = std::max(top, std::fabs(x[i])), zero += x[i] * 0.0f;
    if (zero != 0) {  // nobody shall take such a row for a result
        std::fill_n(to, padded, int16_t(0));
        shorts.scale[size_t(row)] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    if (top < 1e-30f) top = 0;  // next to nothing is none: the inverse would overflow
    vf factor = vset(top > 0 ? float(s16_top) / top : 0.0f);
    float last[LANES] = {};
    for (i = 0; i + LANES <= k; i += LANES) vstore_s16(to + i, vround(vmul(vload(x + i), factor)));
    std::memcpy(last, x + i, size_t(k - i) * 4);
    for (; i < padded; i += LANES) {
        vstore_s16(to + i, vround(vmul(vload(last), factor)));
        std::memset(last, 0, sizeof last);
    }
    shorts.scale[size_t(row)] = top / float(s16_top);
}

// A group's whole numbers to their place, and what belongs to them.
inline void Activations::write_group(Bytes& to, int64_t byte, int64_t at, const vf (&whole)[GROUP / LANES], float scale) const {
    alignas(64) int8_t side_by_side[GROUP];
    int8_t *place = to.x.data() + byte, *first = together == 1 ? place : side_by_side;
    vf sums = vzero();
    FOLIO_UNROLL
    for (int i = 0; i < GROUP / LANES; i++) vstore_s8(first + i * LANES, whole[i]), sums = vadd(sums, whole[i]);
    if (together != 1)
        FOLIO_UNROLL
        for (int i = 0; i < GROUP; i += 4) std::memcpy(place + i * ROWS, side_by_side + i, 4);
    to.scale[size_t(at)] = scale, to.sum[size_t(at)] = scale * vsum(sums);
}

void Activations::set_s8(int64_t row, const float* x) {
    vf squares = vzero();
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) squares = vfma(vload(x + i), vload(x + i), squares);
    float sum = vsum(squares);
    for (; i < k; i++) sum += x[i] * x[i];
    float limit = OUTLIER * std::sqrt(sum / float(k));
    uint64_t* bits = fine.data() + row * words();
    std::fill_n(bits, words(), uint64_t(0));
    int64_t byte = first_byte(row), at = first_group(row);
    if (!std::isfinite(limit)) {  // nothing to be made of such a row; nobody shall take it for a result
        for (int64_t group = 0; group < groups; group++)
            s8.scale[size_t(at + group * together)] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    float last[GROUP] = {};
    std::memcpy(last, x + k / GROUP * GROUP, size_t(k % GROUP) * 4);
    for (int64_t group = 0; group < groups; group++, byte += GROUP * together, at += together) {
        const float* from = (group + 1) * GROUP <= k ? x + group * GROUP : last;
        bits[group / 64] |= uint64_t(set_group(byte, at, from, limit)) << (group % 64);
    }
}

// A group in 8 bits, and what they leave of it; the latter's largest is half a step of the former. Its bytes begin at `byte`;
// its scale is at `at`.
bool Activations::set_group(int64_t byte, int64_t at, const float* x, float limit) {
    vf tops = vzero();
    FOLIO_UNROLL
    for (int64_t i = 0; i < GROUP; i += LANES) tops = vmax(tops, vabs(vload(x + i)));
    // A group of next to nothing is none: the inverse would overflow.
    float top = vtop(tops), scale = top > 1e-30f ? top / 127.0f : 0.0f;
    vf factor = vset(top > 1e-30f ? 127.0f / top : 0.0f), whole[GROUP / LANES];
    FOLIO_UNROLL
    for (int i = 0; i < GROUP / LANES; i++) whole[i] = vround(vmul(vload(x + i * LANES), factor));
    write_group(s8, byte, at, whole, scale);
    rest.scale[size_t(at)] = rest.sum[size_t(at)] = 0;
    if (top <= limit || scale == 0) return false;
    float small = scale * (0.5f / 127.0f);
    vf finer = vset(1.0f / small);
    for (int i = 0; i < GROUP / LANES; i++) {
        vf left = vsub(vload(x + i * LANES), vmul(whole[i], vset(scale)));
        whole[i] = vround(vmax(vmin(vmul(left, finer), vset(127.0f)), vset(-127.0f)));
    }
    write_group(rest, byte, at, whole, small);
    return true;
}

}  // namespace folio
