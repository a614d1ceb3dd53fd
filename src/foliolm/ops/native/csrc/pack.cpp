// Weights into panels, and rows out of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"
#include "rotation.h"
#include "simd.h"

namespace folio {
namespace {

int64_t blocks_of(int64_t k) { return (k + GROUP - 1) / GROUP; }

int64_t panel_bytes(int64_t format, int64_t k) {
    switch (format) {
        case FOLIO_F32: return k * PANEL * 4;
        case FOLIO_BF16: return k * PANEL * 2;
        case FOLIO_I8: return 4 * PANEL + (k + 1) / 2 * 32;
        case FOLIO_Q8_0: return blocks_of(k) * (32 + 512);
        case FOLIO_Q4_0: return blocks_of(k) * (32 + 256);
        default: return blocks_of(k) * (64 + 256);
    }
}

uint16_t read16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

// A block of a 4-bit format in a panel: output `lane`, values q[32], scale and minimum.
void put_nibbles(uint8_t* block, bool minima, int lane, const uint8_t* q, uint16_t scale, uint16_t minimum) {
    std::memcpy(block + 2 * lane, &scale, 2);
    if (minima) std::memcpy(block + 32 + 2 * lane, &minimum, 2);
    uint8_t* to = block + (minima ? 64 : 32);
    for (int t = 0; t < 4; t++)
        for (int j = 0; j < 4; j++) to[t * 64 + lane * 4 + j] = uint8_t(q[4 * t + j] | (q[16 + 4 * t + j] << 4));
}

void put_bytes(uint8_t* block, int lane, const int8_t* q, uint16_t scale) {
    std::memcpy(block + 2 * lane, &scale, 2);
    for (int t = 0; t < 16; t++)
        for (int j = 0; j < 2; j++) block[32 + t * 32 + lane * 2 + j] = uint8_t(q[2 * t + j]);
}

// Q4_K's packed 6-bit scale and minimum of sub-block j.
void scale_min_k4(int j, const uint8_t* packed, int& scale, int& minimum) {
    if (j < 4) {
        scale = packed[j] & 63;
        minimum = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
}

}  // namespace

int64_t packed_bytes(int64_t format, int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * panel_bytes(format, k); }

void pack_floats(int64_t format, int64_t n, int64_t k, const float* rows, uint8_t* packed) {
    std::memset(packed, 0, size_t(packed_bytes(format, n, k)));
    int64_t blocks = blocks_of(k);
    std::vector<float> rotated(format == FOLIO_I8 ? size_t(k) : 0);
    for (int64_t row = 0; row < n; row++) {
        const float* from = rows + row * k;
        uint8_t* panel = packed + row / PANEL * panel_bytes(format, k);
        int lane = int(row % PANEL);
        switch (format) {
            case FOLIO_F32:
                for (int64_t i = 0; i < k; i++) std::memcpy(panel + (i * PANEL + lane) * 4, from + i, 4);
                break;
            case FOLIO_BF16:
                for (int64_t i = 0; i < k; i++) {
                    uint16_t half = float_to_bf16(from[i]);
                    std::memcpy(panel + (i * PANEL + lane) * 2, &half, 2);
                }
                break;
            case FOLIO_I8: {
                hadamard(from, k, rotated.data());
                float top = 0;
                for (float value : rotated) top = std::max(top, std::fabs(value));
                if (top < 1e-30f) top = 0;  // next to nothing is none: the inverse would overflow
                float scale = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
                std::memcpy(panel + 4 * lane, &scale, 4);
                for (int64_t i = 0; i < k; i++)
                    panel[4 * PANEL + i / 2 * 32 + lane * 2 + i % 2] = uint8_t(int8_t(std::nearbyint(rotated[size_t(i)] * inverse)));
                break;
            }
            case FOLIO_Q8_0:
                for (int64_t b = 0; b < blocks; b++) {
                    int64_t begin = b * GROUP, end = std::min(begin + GROUP, k);
                    float top = 0;
                    for (int64_t i = begin; i < end; i++) top = std::max(top, std::fabs(from[i]));
                    uint16_t half = float_to_f16(top / 127.0f);
                    float scale = f16_to_float(half), inverse = scale > 0 ? 1.0f / scale : 0.0f;
                    int8_t q[GROUP] = {};
                    for (int64_t i = begin; i < end; i++)
                        q[i - begin] = int8_t(std::clamp(std::nearbyint(from[i] * inverse), -127.0f, 127.0f));
                    put_bytes(panel + b * (32 + 512), lane, q, half);
                }
                break;
            default:  // the 4-bit formats, from floats: scale and minimum of each block
                for (int64_t b = 0; b < blocks; b++) {
                    int64_t begin = b * GROUP, end = std::min(begin + GROUP, k);
                    float low = 0, high = 0;
                    for (int64_t i = begin; i < end; i++) low = std::min(low, from[i]), high = std::max(high, from[i]);
                    bool minima = format == FOLIO_Q4_1;
                    uint16_t half = float_to_f16(minima ? (high - low) / 15.0f : std::max(-low / 8.0f, high / 7.0f));
                    uint16_t minimum = float_to_f16(low);
                    float scale = f16_to_float(half), offset = minima ? -f16_to_float(minimum) : 8 * scale;
                    uint8_t q[GROUP] = {};
                    for (int64_t i = begin; i < end && scale > 0; i++)
                        q[i - begin] = uint8_t(std::clamp(std::nearbyint((from[i] + offset) / scale), 0.0f, 15.0f));
                    put_nibbles(panel + b * ((minima ? 64 : 32) + 256), minima, lane, q, half, minimum);
                }
        }
    }
}

bool pack_ggml(int64_t type, int64_t format, int64_t n, int64_t k, const uint8_t* rows, uint8_t* packed) {
    constexpr int Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12;
    bool known = (type == Q4_0 && format == FOLIO_Q4_0) || (type == Q4_1 && format == FOLIO_Q4_1) ||
                 (type == Q8_0 && format == FOLIO_Q8_0) || (type == Q4_K && format == FOLIO_Q4_1 && k % 256 == 0);
    if (!known || k % GROUP) return false;
    std::memset(packed, 0, size_t(packed_bytes(format, n, k)));
    int64_t blocks = k / GROUP;
    for (int64_t row = 0; row < n; row++) {
        uint8_t* panel = packed + row / PANEL * panel_bytes(format, k);
        int lane = int(row % PANEL);
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t q[GROUP];
            if (type == Q4_0 || type == Q4_1) {
                int64_t size = type == Q4_0 ? 18 : 20;
                const uint8_t* from = rows + (row * blocks + b) * size;
                const uint8_t* low = from + (type == Q4_0 ? 2 : 4);
                for (int i = 0; i < 16; i++) q[i] = low[i] & 15, q[16 + i] = low[i] >> 4;
                uint16_t minimum = type == Q4_1 ? read16(from + 2) : uint16_t(0);
                put_nibbles(panel + b * ((type == Q4_1 ? 64 : 32) + 256), type == Q4_1, lane, q, read16(from), minimum);
            } else if (type == Q8_0) {
                const uint8_t* from = rows + (row * blocks + b) * 34;
                put_bytes(panel + b * (32 + 512), lane, reinterpret_cast<const int8_t*>(from + 2), read16(from));
            } else {
                const uint8_t* from = rows + (row * blocks + b) / 8 * 144;
                int j = int(b % 8), scale, minimum;
                scale_min_k4(j, from + 4, scale, minimum);
                const uint8_t* low = from + 16 + j / 2 * 32;
                for (int i = 0; i < 32; i++) q[i] = j % 2 ? low[i] >> 4 : low[i] & 15;
                put_nibbles(panel + b * (64 + 256), true, lane, q, float_to_f16(f16_to_float(read16(from)) * float(scale)),
                            float_to_f16(-f16_to_float(read16(from + 2)) * float(minimum)));
            }
        }
    }
    return true;
}

void unpack_row(const FolioWeight& weight, int64_t row, float* out) {
    int64_t k = weight.k;
    const uint8_t* panel = weight.data + row / PANEL * panel_bytes(weight.format, k);
    int lane = int(row % PANEL);
    for (int64_t i = 0; i < k; i++) {
        int64_t b = i / GROUP, j = i % GROUP;
        switch (weight.format) {
            case FOLIO_F32: std::memcpy(out + i, panel + (i * PANEL + lane) * 4, 4); break;
            case FOLIO_BF16: out[i] = bf16_to_float(read16(panel + (i * PANEL + lane) * 2)); break;
            case FOLIO_I8: {
                float scale;
                std::memcpy(&scale, panel + 4 * lane, 4);
                out[i] = scale * float(int8_t(panel[4 * PANEL + i / 2 * 32 + lane * 2 + i % 2]));
                break;
            }
            case FOLIO_Q8_0: {
                const uint8_t* block = panel + b * (32 + 512);
                out[i] = f16_to_float(read16(block + 2 * lane)) * float(int8_t(block[32 + j / 2 * 32 + lane * 2 + j % 2]));
                break;
            }
            default: {
                bool minima = weight.format == FOLIO_Q4_1;
                const uint8_t* block = panel + b * ((minima ? 64 : 32) + 256);
                float scale = f16_to_float(read16(block + 2 * lane));
                float minimum = minima ? f16_to_float(read16(block + 32 + 2 * lane)) : -8 * scale;
                int64_t in = j % 16;
                uint8_t both = block[(minima ? 64 : 32) + in / 4 * 64 + lane * 4 + in % 4];
                out[i] = scale * float(j < 16 ? both & 15 : both >> 4) + minimum;
            }
        }
    }
    if (weight.format == FOLIO_I8) hadamard(out, k, out);
}

}  // namespace folio
