// The names of simd.h, which includes this file, for vectors that any compiler has, of 16 bytes.
#pragma once

namespace folio {

constexpr int LANES = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef int16_t vshorts __attribute__((vector_size(16)));
typedef uint16_t vwords __attribute__((vector_size(16)));
template <class T>
struct Narrow {  // LANES of a smaller type
    typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
};
template <class T>
inline vi widen(const T* p) {
    typename Narrow<T>::Vector a;
    std::memcpy(&a, p, sizeof a);
    return __builtin_convertvector(a, vi);
}
template <class T>
inline void narrow(T* p, vf whole) {
    auto a = __builtin_convertvector(__builtin_convertvector(whole, vi), typename Narrow<T>::Vector);
    std::memcpy(p, &a, sizeof a);
}
inline vf vzero() { return vf{0, 0, 0, 0}; }
inline vf vload(const float* p) {
    vf a;
    std::memcpy(&a, p, 16);
    return a;
}
inline void vstore(float* p, vf a) { std::memcpy(p, &a, 16); }
inline vf vload_some(const float* p, int count) {
    vf a = {0, 0, 0, 0};
    std::memcpy(&a, p, size_t(count) * 4);
    return a;
}
inline void vstore_some(float* p, vf a, int count) { std::memcpy(p, &a, size_t(count) * 4); }
inline vf vset(float a) { return vf{a, a, a, a}; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vabs(vf a) { return a < 0 ? -a : a; }
inline float vsum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline void vsum4(vf a, vf b, vf c, vf d, float* out) { out[0] = vsum(a), out[1] = vsum(b), out[2] = vsum(c), out[3] = vsum(d); }
inline float vtop(vf a) { return std::fmax(std::fmax(a[0], a[1]), std::fmax(a[2], a[3])); }
inline vf vwhere_ge(vf a, vf b, vf x) { return a >= b ? x : vzero(); }
inline unsigned vabove(vf a, vf b) {
    unsigned bits = 0;
    for (int i = 0; i < LANES; i++) bits |= unsigned(a[i] > b[i]) << i;
    return bits;
}
inline vf vbetween(vf a, int from, int to) {
    for (int i = 0; i < LANES; i++)
        if (i < from || i >= to) a[i] = -INFINITY;
    return a;
}
inline int vstore_ge(float* p, vf a, vf b) {
    int count = 0;
    for (int i = 0; i < 4; i++) {
        p[count] = a[i];
        count += a[i] >= b[i];
    }
    return count;
}
struct WideSum {  // of floats, in doubles
    double lanes[4] = {0, 0, 0, 0};
    void add(vf a) {
        for (int i = 0; i < 4; i++) lanes[i] += double(a[i]);
    }
    double sum() const { return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]); }
};
inline vf vload_bf16(const uint16_t* p) {
    return vf(widen(p) << 16);
}
inline vf vload_f16(const uint16_t* p) {
    return vf{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])};
}
inline vf vload_s8(const int8_t* p) { return __builtin_convertvector(widen(p), vf); }
inline void vstore_s16(int16_t* p, vf a) { narrow(p, a); }  // whole numbers within range
inline void vstore_s8(int8_t* p, vf a) { narrow(p, a); }
inline void vstore_bf16(uint16_t* p, vf a) {
    for (int i = 0; i < LANES; i++) p[i] = float_to_bf16(a[i]);
}
// Beyond 1.5 · 2^23 a float has no fraction; numbers are smaller than that by far.
inline vf vround(vf a) { return a + 12582912.0f - 12582912.0f; }
inline void vproduct_u8(int8_t* p, vf a, vf b) { vstore_s8(p, vround(vmul(a, b))); }
inline vf vpow2(vf n) {
    vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
    vf result;
    std::memcpy(&result, &bits, 16);
    return result;
}
inline vi iload(const void* p) {
    vi a;
    std::memcpy(&a, p, 16);
    return a;
}
inline void istore(void* p, vi a) { std::memcpy(p, &a, 16); }
inline vi izero() { return vi{0, 0, 0, 0}; }
inline vi iset(int32_t a) { return vi{a, a, a, a}; }
inline vi ispread4(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return vi{four, four, four, four};
}
inline vi iwiden8(const int8_t* p) {
    typedef int8_t Bytes __attribute__((vector_size(8)));
    Bytes a;
    std::memcpy(&a, p, sizeof a);
    return vi(__builtin_convertvector(a, vshorts));
}
inline vi dot2_spread(vi acc, vi w, const void* p) {
    vi x = ispread4(p);
    return acc + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
}
inline vf ifloat(vi a) { return __builtin_convertvector(a, vf); }
inline vi dot4(vi acc, vi w, vi x) {
    // Products of bytes as such of 16 bits, which a sum of two fits in.
    vshorts pairs = vshorts(vwords(w) & 255) * (vshorts(x) << 8 >> 8) + vshorts(vwords(w) >> 8) * (vshorts(x) >> 8);
    return acc + (vi(pairs) << 16 >> 16) + (vi(pairs) >> 16);
}
inline vi dot4_spread(vi acc, vi w, const void* p) { return dot4(acc, w, ispread4(p)); }
inline vi dot4_sums(vi acc) { return acc; }
inline vi dot4_bytes(vi acc, vi u, vi s) { return dot4(acc, u, s); }
inline vi iflip(vi a) { return a ^ int32_t(0x80808080); }
inline vi keep(vi a) { return a; }
inline vf keep(vf a) { return a; }
// A nibble of each lane, `shift` bits above its lowest.
inline vi inibble(vi a, int shift) { return (a >> shift) & 15; }
inline vi iadd(vi a, vi b) { return a + b; }
inline vi ilow4(vi a) { return a & 0x0f0f0f0f; }
inline vi ihigh4(vi a) { return (a >> 4) & 0x0f0f0f0f; }

}  // namespace folio
