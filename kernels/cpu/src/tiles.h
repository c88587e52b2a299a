// How packed weights lie in memory: tiles of 8 output rows, each a run of blocks of 32 or
// 256 input columns. The number of rows is padded to 8 with zeros.
//
// A file's blocks are regrouped, not rounded: a tile holds the file's own codes, scales
// and minima, and takes as many bytes or a few more.
//
// Codes of 4, 2 and 1 bits lie in planes that serve 32 columns, as steps s = 0..7 of 4
// columns each. Byte 4 r + j of 32 belongs to row r and to column j of a step:
//   4 bits: 4 x 32 bytes; byte block i holds step i in its low nibbles, step i + 4 in its high ones.
//   2 bits: 2 x 32 bytes; byte block i holds step i + 2 t in bits 2 t and 2 t + 1.
//   1 bit:  1 x 32 bytes; bit s is step s.
#pragma once

#include <cstdint>

#include "kvasir_cpu.h"

enum { NIBBLE_PLANE = 128, TWO_BIT_PLANE = 64, ONE_BIT_PLANE = 32, BLOCK = 256, BLOCK_GROUPS = BLOCK / KV_GROUP };

using Half = uint16_t;

struct TileQ4_0 {  // value = scale * (code - 8)
    Half scale[KV_TILE];
    uint8_t codes[NIBBLE_PLANE];
};
struct TileQ5_0 {  // value = scale * (code - 16)
    Half scale[KV_TILE];
    uint8_t low[NIBBLE_PLANE], high[ONE_BIT_PLANE];
};
struct TileQ4_1 {  // value = scale * code + minimum
    Half scale[KV_TILE], minimum[KV_TILE];
    uint8_t codes[NIBBLE_PLANE];
};
struct TileQ5_1 {  // likewise
    Half scale[KV_TILE], minimum[KV_TILE];
    uint8_t low[NIBBLE_PLANE], high[ONE_BIT_PLANE];
};
struct TileMXFP4 {  // value = scale * (the 4-bit float that the code names, doubled)
    uint16_t scale[KV_TILE];  // bfloat16, which holds every power of two
    uint8_t codes[NIBBLE_PLANE];
};

// value = scale * byte; byte 16 s + 2 r + j is row r's column 2 s + j.
struct TileQ8_0 {
    Half scale[KV_TILE];
    int8_t bytes[KV_GROUP * KV_TILE];
};
// value = scale * (the number that the code names); byte 16 s + 2 r + j holds row r's column
// 2 s + j in its low nibble and column 16 + 2 s + j in its high one.
struct TileIQ4NL {
    Half scale[KV_TILE];
    uint8_t codes[NIBBLE_PLANE];
};

template <class Value>
struct TileDense {
    Value values[KV_GROUP * KV_TILE];  // value 8 c + r is row r's column c
};

// Of 256 columns; each group of 16 or 32 columns has its own multiple of a row's scale and minimum.
struct TileQ2K {  // value = d * (scales & 15) * code - dmin * (scales >> 4)
    Half d[KV_TILE], dmin[KV_TILE];
    uint8_t scales[2 * BLOCK_GROUPS][KV_TILE];
    uint8_t codes[BLOCK_GROUPS][TWO_BIT_PLANE];
};
struct TileQ3K {  // value = d * scale * (code - 4)
    Half d[KV_TILE];
    int8_t scales[2 * BLOCK_GROUPS][KV_TILE];
    struct {
        uint8_t low[TWO_BIT_PLANE], high[ONE_BIT_PLANE];
    } groups[BLOCK_GROUPS];
};
struct TileQ4K {  // value = d * scale * code - dmin * minimum
    Half d[KV_TILE], dmin[KV_TILE];
    uint8_t scales[BLOCK_GROUPS][KV_TILE], minima[BLOCK_GROUPS][KV_TILE];
    uint8_t codes[BLOCK_GROUPS][NIBBLE_PLANE];
};
struct TileQ5K {  // likewise
    Half d[KV_TILE], dmin[KV_TILE];
    uint8_t scales[BLOCK_GROUPS][KV_TILE], minima[BLOCK_GROUPS][KV_TILE];
    struct {
        uint8_t low[NIBBLE_PLANE], high[ONE_BIT_PLANE];
    } groups[BLOCK_GROUPS];
};
struct TileQ6K {  // value = d * scale * (code - 32)
    Half d[KV_TILE];
    int8_t scales[2 * BLOCK_GROUPS][KV_TILE];
    struct {
        uint8_t low[NIBBLE_PLANE], high[TWO_BIT_PLANE];
    } groups[BLOCK_GROUPS];
};
struct TileIQ4XS {  // value = d * scale * (the number that the code names), nibbles as in TileIQ4NL
    Half d[KV_TILE];
    int8_t scales[BLOCK_GROUPS][KV_TILE];
    uint8_t codes[BLOCK_GROUPS][NIBBLE_PLANE];
};

struct TileShape {
    int32_t columns, bytes;
};
TileShape tile_shape(int32_t weight_format);  // bytes 0 for an unknown format
// Whether a format multiplies 8-bit activations or byte pairs; the others take int16, dense ones floats.
bool multiplies_bytes(int32_t weight_format);
bool is_dense(int32_t weight_format);

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Plus 12, so that they are codes of 5 bits.
constexpr int8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
