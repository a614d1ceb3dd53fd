#include "activations.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "rotation.h"
#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

// So many times its row's root mean square a value stands out, where weights have 4 bits and where they have 8.
// (SmolLM2-135M on AVX-512, floats as KV: with 8, 10 and 12 for 4 bits the KL to float32 is about 0.0027, 0.0033 and 0.0040;
// prompts take 1% more time with 8 than with 10.)
constexpr float OUTLIER = 10.0f, OUTLIER_OF_BYTES = 4.0f;

static_assert(BLOCKS == 4, "vsum4");

// WIDE values times a factor, rounded, as bytes; and the sum of each group's.
inline void vstore_s8_sums(const float* x, float factor, int8_t* bytes, float* sum) {
#if defined(FOLIO_AVX512)
    vf fours[2];
    for (int i = 0; i < 2; i++, x += 64) {
        vi all = ibytes(vmul(vload(x), vset(factor)), vmul(vload(x + 16), vset(factor)), vmul(vload(x + 32), vset(factor)),
                        vmul(vload(x + 48), vset(factor)));
        istore(bytes + 64 * i, all);
        fours[i] = ifloat(dot4_bytes(izero(), iset(0x01010101), all));
    }
    vsum_halves(fours[0], fours[1], sum);
#else
    vf sums[BLOCKS];
    FOLIO_UNROLL
    for (int b = 0; b < BLOCKS; b++) {
        sums[b] = vzero();
        FOLIO_UNROLL
        for (int i = b * GROUP; i < (b + 1) * GROUP; i += LANES) {
            vf whole = vround(vmul(vload(x + i), vset(factor)));
            vstore_s8(bytes + i, whole), sums[b] = vadd(sums[b], whole);
        }
    }
    vsum4(sums[0], sums[1], sums[2], sums[3], sum);
#endif
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
    wides = (groups + BLOCKS - 1) / BLOCKS;
    padded = groups * GROUP;
    forms = forms_of(linear);
    if (forms.bf16 && !in_pairs(rows)) forms.bf16 = false, forms.f32 = true;
    outliers.times = OUTLIER;
    if (forms.s16 && in_bytes(rows)) forms.s16 = false, forms.s8 = true, outliers.times = OUTLIER_OF_BYTES;
    if (floats) forms.f32 = true;
    auto grow = [](auto& vector, int64_t size) {
        if (int64_t(vector.size()) < size) vector.resize(size_t(size));
    };
    together = forms.s8 && rows > FEW ? ROWS : 1;
    if (forms.f32) grow(f32, rows * k);
    if (forms.bf16) grow(bf16, rows * padded);
    if (forms.s8) {
        int64_t whole = (rows + together - 1) / together * together;
        grow(s8.x, whole * padded), grow(s8.scale, whole * wides), grow(s8.sum, whole * groups);
        if (!EXPANDS) grow(s8.offset, whole * wides);
        // Squares of more of them would exceed the sum of all squares.
        outliers.most = int64_t(float(k) / (outliers.times * outliers.times)) + 1;
        grow(outliers.count, rows), grow(outliers.column, rows * outliers.most), grow(outliers.value, rows * outliers.most);
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

void Activations::set_s8(int64_t row, const float* x) {
    outliers.count[size_t(row)] = 0;
    float last[WIDE] = {};
    std::memcpy(last, x + k / WIDE * WIDE, size_t(k % WIDE) * 4);
    auto floats = [&](int64_t wide) { return (wide + 1) * WIDE <= k ? x + wide * WIDE : last; };
    float* scale = s8.scale.data() + first_scale(row);  // until it is known: the largest absolute value
    vf squares[BLOCKS];
    for (auto& each : squares) each = vzero();
    for (int64_t wide = 0; wide < wides; wide++) {
        const float* from = floats(wide);
        vf top = vzero();
        for (int i = 0; i < WIDE; i += BLOCKS * LANES) {
            FOLIO_UNROLL
            for (int c = 0; c < BLOCKS; c++) {
                vf all = vload(from + i + c * LANES);
                squares[c] = vfma(all, all, squares[c]), top = vmax(top, vabs(all));
            }
        }
        scale[wide * together] = vtop(top);
    }
    float square = vsum(vadd(vadd(squares[0], squares[1]), vadd(squares[2], squares[3])));
    float limit = outliers.times * std::sqrt(square / float(k));
    for (int64_t wide = 0; wide < wides; wide++)
        scale[wide * together] = set_wide(row, wide, floats(wide), scale[wide * together], limit);
    // Nothing is to be made of a row that is not finite; nobody shall take it for a result.
    if (!std::isfinite(limit)) scale[0] = std::numeric_limits<float>::quiet_NaN();
}

// WIDE values, the largest of which is `top`; returns their scale.
float Activations::set_wide(int64_t row, int64_t wide, const float* x, float top, float limit) {
    if (top < 1e-30f) top = 0;  // next to nothing is none: the inverse would overflow
    alignas(64) float others[WIDE];
    if (top > limit) {
        std::memcpy(others, x, sizeof others);
        top = set_apart(row, wide * WIDE, others, limit), x = others;
    }
    alignas(64) int8_t bytes[WIDE];
    alignas(16) float sum[BLOCKS];
    vstore_s8_sums(x, top > 0 ? 127.0f / top : 0.0f, bytes, sum);
    int64_t begin = row / together * together, within = row % together, first = wide * BLOCKS;
    int64_t count = std::min<int64_t>(BLOCKS, groups - first);
    int8_t* to = s8.x.data() + begin * padded + within * SIDE + first * GROUP * together;
    for (int64_t i = 0; i < count * GROUP; i += SIDE) std::memcpy(to + i * together, bytes + i, SIDE);
    float* sums = s8.sum.data() + begin * groups + within + first * together;
    for (int64_t b = 0; b < count; b++) sums[b * together] = sum[b];
    if (!EXPANDS) s8.offset[size_t(first_scale(row) + wide * together)] = int32_t(-128.0f * (sum[0] + sum[1] + sum[2] + sum[3]));
    return top / 127.0f;
}

// What stands out among WIDE values, of a row's columns from `column` on, leaves 0 there; returns the largest of the others.
float Activations::set_apart(int64_t row, int64_t column, float* x, float limit) {
    uint32_t& count = outliers.count[size_t(row)];
    vf tops = vzero();
    for (int i = 0; i < WIDE; i += LANES) {
        for (unsigned above = vabove(vabs(vload(x + i)), vset(limit)); above && count < outliers.most; above &= above - 1) {
            int64_t at = row * outliers.most + count++;
            int lane = i + std::countr_zero(above);
            outliers.column[size_t(at)] = uint32_t(column + lane), outliers.value[size_t(at)] = x[lane];
            x[lane] = 0;
        }
        tops = vmax(tops, vabs(vload(x + i)));
    }
    float top = vtop(tops);
    return top < 1e-30f ? 0 : top;
}

}  // namespace folio
