// The plain C interface of Kvasir's native CPU kernels.
//
// A model step is a list of operations, each reading and writing buffers whose
// addresses are fixed when the list is made; only the batch changes from run to run.
// One call runs the whole list on the library's own threads.
//
// Weights are packed in tiles of 8 output rows. Within a tile, one group covers 32
// input columns:
//   4 bit: scale[8], minimum[8], 128 bytes. Byte 32 s + 4 r + j holds row r's column
//          4 s + j in its low nibble and column 16 + 4 s + j in its high one.
//          value = scale * nibble + minimum.
//   8 bit: scale[8], 256 bytes. Byte 16 s + 2 r + j holds row r's column 2 s + j.
//          value = scale * byte.
//   dense: 256 values; value 8 c + r is row r's column c.
// The number of rows is padded to 8 with zeros; columns are a multiple of 32.
//
// Activations are quantised per group of 32: to int8 or to pairs of bytes for 4-bit
// weights (with the group's scaled sum, which the minimum multiplies), to int16 for 8-bit ones.
//
// The KV cache holds, for each layer and block of block_size tokens,
//   keys   [num_kv_heads][head_dim][block_size]   (token innermost: scores are lanes)
//   values [num_kv_heads][block_size][head_dim].
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KV_EXPORT __declspec(dllexport)
#else
#define KV_EXPORT __attribute__((visibility("default")))
#endif

enum { KV_ABI_VERSION = 1, KV_GROUP = 32, KV_TILE = 8 };

enum KvWeightFormat {
    KV_Q4_F16 = 0,  // 4 bit, half scales and minima
    KV_Q4_F32 = 1,  // 4 bit, float scales and minima
    KV_Q8_F16 = 2,  // 8 bit, half scales
    KV_Q8_F32 = 3,  // 8 bit, float scales
    KV_DENSE_F32 = 4,
    KV_DENSE_F16 = 5,
    KV_DENSE_BF16 = 6,
};

enum KvSourceFormat {
    KV_SOURCE_Q4_0 = 0,
    KV_SOURCE_Q4_1 = 1,
    KV_SOURCE_Q8_0 = 2,
    KV_SOURCE_F32 = 3,
    KV_SOURCE_F16 = 4,
    KV_SOURCE_BF16 = 5,
};

typedef struct {
    int32_t format;
    int32_t rows;     // output features
    int32_t columns;  // input features, a multiple of KV_GROUP
    int32_t reserved;
    const void* data;
} KvWeight;

enum KvOpKind {
    KV_OP_EMBED = 0,      // weight: table; out: float [rows][columns]; f[0]: factor
    KV_OP_NORM = 1,       // in: float; norm: float [columns]; f[0]: epsilon; out: see activation
    KV_OP_QUANTIZE = 2,   // in: float; out: see activation
    KV_OP_MATMUL = 3,     // activation in, weight, bias or NULL, float out; see epilogue
    KV_OP_ROPE_KV = 4,    // in: qkv float, rotated in place; writes the KV cache
    KV_OP_ATTENTION = 5,  // in: rotated qkv; out: float [rows][num_heads * head_dim]
    KV_OP_SELECT = 6,     // in: float [rows][columns]; out: the rows named by the batch
};

enum KvActivation {
    KV_ACT_F32 = 0,
    KV_ACT_INT8 = 1,
    KV_ACT_INT16 = 2,
    KV_ACT_BYTE_PAIR = 3,  // 16 bits too, each 4 columns as 4 high bytes, then 4 low: value = 256 * high + low
};

enum KvEpilogue {
    KV_STORE = 0,
    KV_ADD = 1,     // out += result (the residual stream)
    KV_SWIGLU = 2,  // weight rows: all gates, then all ups; out [rows][weight.rows / 2] = silu(gate) * up
    KV_GEGLU = 3,   // likewise with the tanh approximation of GELU
};

// A quantised or plain activation of up to max_rows rows of `columns` values.
typedef struct {
    int32_t kind;
    int32_t columns;
    void* values;       // float, int8_t, int16_t or byte pairs [max_rows][columns]
    float* scales;      // [max_rows][columns / 32], NULL for float
    float* scaled_sums; // [max_rows][columns / 32], what 4-bit weights need
} KvActivationBuffer;

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int32_t block_size, kv_is_half, window, reserved;  // window 0: none
    float scale, soft_cap, norm_eps, reserved_float;   // soft_cap 0: none
    const float* cos;  // [max_position][rotary_dim / 2]
    const float* sin;
    const float* q_norm;  // [head_dim] or NULL
    const float* k_norm;
    void* keys;
    void* values;
} KvAttentionSpec;

typedef struct {
    int32_t kind;
    int32_t epilogue;
    int32_t columns;
    int32_t on_selected;    // the operation runs on the selected rows only
    float factor;           // KV_OP_EMBED: multiplier; KV_OP_NORM: epsilon
    int32_t output_stride;  // KV_OP_MATMUL: floats from one output row to the next; 0: its own width
    const void* input;      // float buffer
    void* output;           // float buffer
    const float* norm;      // [columns], KV_OP_NORM
    const float* bias;      // [weight.rows] or NULL
    const KvWeight* weight;
    const KvActivationBuffer* activation;  // written by NORM and QUANTIZE, read by MATMUL
    const KvAttentionSpec* attention;
} KvOp;

typedef struct {
    int32_t num_rows;
    int32_t num_sequences;
    int32_t num_selected;
    int32_t max_blocks;             // row length of block_tables
    const int32_t* input_ids;       // [num_rows]
    const int32_t* positions;       // [num_rows]
    const int64_t* slot_mapping;    // [num_rows], block * block_size + offset; < 0: not written
    const int32_t* cu_seqlens_q;    // [num_sequences + 1]
    const int32_t* seq_lens;        // [num_sequences], tokens in the cache after this step
    const int32_t* block_tables;    // [num_sequences][max_blocks]
    const int32_t* selected;        // [num_selected] row indices
} KvBatch;

KV_EXPORT int32_t kv_abi_version(void);
// "avx512vnni", "avx2", "neon" or "portable": the best that both the build and this processor have.
KV_EXPORT const char* kv_instruction_set(void);
// Names the instruction sets usable here, separated by spaces.
KV_EXPORT const char* kv_instruction_sets(void);
// Returns 0, or -1 if this build or this processor lacks the instruction set.
KV_EXPORT int32_t kv_use_instruction_set(const char* name);
// Starts or resizes the thread pool, the calling thread included. Returns the number in use.
KV_EXPORT int32_t kv_set_num_threads(int32_t num_threads);
KV_EXPORT int64_t kv_packed_bytes(int32_t weight_format, int32_t rows, int32_t columns);
// The packed format that holds a source format without loss, or -1.
KV_EXPORT int32_t kv_packed_format(int32_t source_format);
// Packs rows [rows][source row bytes]; returns 0, or -1 for a shape or format it does not know.
KV_EXPORT int32_t kv_pack(int32_t source_format, const void* source, int32_t rows, int32_t columns, void* packed);
// Writes weight rows first..first+count as float [count][columns].
KV_EXPORT int32_t kv_dequantize(const KvWeight* weight, int32_t first, int32_t count, float* out);
// Runs the operations in order. Not to be called from two threads at once.
// Returns 0, or -1 - i when operation i asks for something that this library does not do.
KV_EXPORT int32_t kv_run(const KvOp* ops, int32_t num_ops, const KvBatch* batch);
// The same, adding the nanoseconds each operation took to nanoseconds[num_ops].
KV_EXPORT int32_t kv_run_profiled(const KvOp* ops, int32_t num_ops, const KvBatch* batch, int64_t* nanoseconds);

#ifdef __cplusplus
}
#endif
