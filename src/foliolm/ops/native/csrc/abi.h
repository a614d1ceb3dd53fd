// What crosses the border to Python: plain structures, mirrored field by field in abi.py.
#pragma once

#include <cstdint>

extern "C" {

enum FolioFormat : int64_t {
    FOLIO_F32 = 0,   // [N/16][K][16] float32
    FOLIO_BF16 = 1,  // [N/16][K][16] bfloat16
    // [N/16] { [16] float32 scales, [K/2][16][2] int8 }, K padded to even; each output's row rotated (rotation.h)
    FOLIO_I8 = 2,
    FOLIO_Q8_0 = 3,  // [N/16][K/32] { [16] float16 scales, [16][16][2] int8 }
    FOLIO_Q4_0 = 4,  // [N/16][K/32] { [16] float16 scales, nibbles }, values from −8 to 7
    FOLIO_Q4_1 = 5,  // [N/16][K/32] { [16] float16 scales, [16] float16 minima, nibbles }
    // Nibbles: [4][16][4] bytes; byte (t, n, j) holds weight 4t+j of output n below, weight 16+4t+j above.
    FOLIO_FORMATS = 6
};

// A matrix [n, k], packed in panels of 16 outputs; the last one is padded with zeros.
struct FolioWeight {
    int64_t format, n, k;
    const uint8_t* data;
};

// Up to three matrices over the same input, their outputs side by side.
struct FolioLinear {
    int64_t num_parts;
    FolioWeight parts[3];
    const float* bias;  // [sum of n] or null
};

struct FolioLayer {
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    FolioLinear qkv, o, gate_up, down;
    int64_t group;  // index of its KV group
};

struct FolioModel {
    int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate, num_layers;
    float eps, rope_scale;
    const float* frequencies;  // [head_dim / 2] radians a position
    const float* norm;
    const FolioLayer* layers;
    FolioWeight embed;
};

enum FolioKV : int64_t { FOLIO_KV_F32 = 0, FOLIO_KV_BF16 = 1, FOLIO_KV_I8 = 2 };

// An adapter's part of one FolioLinear: y += (x · aᵀ) · bᵀ, part by part. What part i's matrix multiplies begins at
// `offsets[i]` of x · aᵀ. Without data a matrix is not there.
struct FolioLoraLinear {
    FolioWeight a;     // [sum of the parts' ranks, in]
    FolioWeight b[3];  // [out, rank], the scale in it
    int64_t offsets[3];
};

// The adapters of a step. An adapter has four linears a layer (qkv, o, gate and up, down), then that of the head.
struct FolioLora {
    int64_t num_slots;
    const FolioLoraLinear* const* adapters;  // [slots], null where a slot is empty
    const int32_t* slots;                    // [tokens] each one's slot, or −1
    const int32_t* output_slots;             // [outputs] the same of those behind the last layer
};

// One KV group's rows of a step.
struct FolioGroup {
    const int32_t* table;  // [rows, width] blocks
    int64_t width;
    const int64_t* slots;  // [tokens] block · block size + position within it
    int64_t window;        // 0: none
};

struct FolioStep {
    int64_t num_tokens, num_rows, num_outputs;
    const int64_t* ids;        // [tokens]
    const int64_t* positions;  // [tokens]
    const int64_t* outputs;    // [outputs] tokens whose hidden states are wanted
    const int32_t* starts;     // [rows + 1] first token of each row
    const int32_t* used;       // [rows] tokens of context, the step's own included
    const FolioGroup* groups;
    uint8_t* const* keys;  // a pool a layer: [blocks, block size, kv heads, head_dim] (int8: see pages.h)
    uint8_t* const* values;
    int64_t block_size, kv_format, threads;
    float* hidden;  // [outputs, hidden] normalised hidden states
    const FolioLora* lora;  // null: no token has an adapter
    int64_t deterministic;  // not 0: a token's result does not depend on what else the step holds
};

}  // extern "C"
