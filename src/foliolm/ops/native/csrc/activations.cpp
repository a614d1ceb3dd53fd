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

// Groups of a row whose scales are found at once.
constexpr int64_t STRETCH = 64;

// Largest absolute values of a group, by lane.
inline vf tops_of(const float* x) {
    vf tops = vabs(vload(x));
    FOLIO_UNROLL
    for (int i = LANES; i < GROUP; i += LANES) tops = vmax(tops, vabs(vload(x + i)));
    return tops;
}

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
    uint64_t* bits = fine.data() + row * words();
    std::fill_n(bits, words(), uint64_t(0));
    int64_t byte = first_byte(row), at = first_group(row);
    float last[GROUP] = {};
    std::memcpy(last, x + k / GROUP * GROUP, size_t(k % GROUP) * 4);
    auto floats = [&](int64_t group) { return (group + 1) * GROUP <= k ? x + group * GROUP : last; };
    vf squares = vzero(), highest = vzero();
    // Many groups' scales, then their numbers: one group after the other, each would wait for its own division.
    alignas(64) float scale[STRETCH] = {}, factor[STRETCH];
    for (int64_t first = 0; first < groups; first += STRETCH) {
        int64_t count = std::min(STRETCH, groups - first), g;
        for (g = 0; g < count; g += 4)
            vtop4(tops_of(floats(first + g)), tops_of(floats(first + g + 1)), tops_of(floats(first + g + 2)),
                  tops_of(floats(first + g + 3)), scale + g);
        for (g = 0; g < count; g += LANES) {
            vf top = vload(scale + g), least = vset(1e-30f);  // a group of less is none: the inverse would overflow
            highest = vmax(highest, top);
            vstore(scale + g, vwhere_ge(top, least, vdiv(top, vset(127.0f))));
            vstore(factor + g, vwhere_ge(top, least, vdiv(vset(127.0f), top)));
        }
        for (g = 0; g < count; g++) {
            int64_t place = (first + g) * together;
            vf whole[GROUP / LANES];
            FOLIO_UNROLL
            for (int i = 0; i < GROUP / LANES; i++) {
                vf all = vload(floats(first + g) + i * LANES);
                squares = vfma(all, all, squares);
                whole[i] = vround(vmul(all, vset(factor[g])));
            }
            write_group(s8, byte + place * GROUP, at + place, whole, scale[g]);
            rest.scale[size_t(at + place)] = rest.sum[size_t(at + place)] = 0;
        }
    }
    float limit = OUTLIER * std::sqrt(vsum(squares) / float(k));
    if (!std::isfinite(limit)) {  // nothing to be made of such a row; nobody shall take it for a result
        for (int64_t group = 0; group < groups; group++)
            s8.scale[size_t(at + group * together)] = std::numeric_limits<float>::quiet_NaN();
    } else if (vtop(highest) > limit) {
        for (int64_t group = 0; group < groups; group++, byte += GROUP * together, at += together)
            if (set_rest(byte, at, floats(group), limit)) bits[group / 64] |= uint64_t(1) << (group % 64);
    }
}

// What 8 bits leave of a group, if its largest stands out: half a step of theirs at most. Its bytes begin at `byte`; its
// scale is at `at`.
bool Activations::set_rest(int64_t byte, int64_t at, const float* x, float limit) {
    float scale = s8.scale[size_t(at)];
    if (scale == 0 || scale * 128.0f <= limit) return false;  // the largest is less than that
    float top = vtop(tops_of(x));
    if (top <= limit) return false;
    float small = scale * (0.5f / 127.0f);
    vf factor = vset(127.0f / top), finer = vset(1.0f / small), whole[GROUP / LANES];
    for (int i = 0; i < GROUP / LANES; i++) {
        vf all = vload(x + i * LANES), left = vsub(all, vmul(vround(vmul(all, factor)), vset(scale)));
        whole[i] = vround(vmax(vmin(vmul(left, finer), vset(127.0f)), vset(-127.0f)));
    }
    write_group(rest, byte, at, whole, small);
    return true;
}

}  // namespace folio
