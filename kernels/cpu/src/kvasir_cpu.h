// The plain C interface of Kvasir's native CPU kernels.
//
// A model step is a list of operations, each reading and writing buffers whose
// addresses are fixed when the list is made; only the batch changes from run to run.
// One call runs the whole list on the library's own threads.
//
// Weights are packed in tiles of 8 output rows (tiles.h), close to the size they have in a
// model file. Columns are a multiple of 32, for the K formats of 256.
//
// Activations are quantised per group of 32: to int8 or to pairs of bytes where codes of up
// to 6 bits multiply them (with scaled sums, which a minimum multiplies), to int16 for bytes.
//
// The KV cache holds, for each layer and block of block_size tokens,
//   keys   [num_kv_heads][head_dim][block_size]   (token innermost: scores are lanes)
//   values [num_kv_heads][block_size][head_dim]
// as floats, halves or signed bytes; for bytes also what a step of each vector is worth,
//   key_scales, value_scales float [num_kv_heads][block_size].
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

enum { KV_ABI_VERSION = 6, KV_GROUP = 32, KV_TILE = 8, KV_PANEL = 4 };

// As GGUF files have them, whose numbers all are held exactly; and plain numbers.
enum KvWeightFormat {
    KV_F32 = 0,
    KV_F16 = 1,
    KV_BF16 = 2,
    KV_Q4_0 = 3,
    KV_Q4_1 = 4,
    KV_Q5_0 = 5,
    KV_Q5_1 = 6,
    KV_Q8_0 = 7,
    KV_Q2_K = 8,
    KV_Q3_K = 9,
    KV_Q4_K = 10,
    KV_Q5_K = 11,
    KV_Q6_K = 12,
    KV_IQ4_NL = 13,
    KV_IQ4_XS = 14,
    KV_MXFP4 = 15,
    KV_NUM_FORMATS = 16,
};

typedef struct {
    int32_t format;
    int32_t rows;     // output features
    int32_t columns;  // input features, a multiple of KV_GROUP
    int32_t reserved;
    const void* data;
} KvWeight;

// Rows of a matrix as a model file holds them, one behind the other.
typedef struct {
    const void* rows;
    int64_t num_rows;
} KvRows;

// A matrix to be packed: the rows of all parts, on top of each other.
typedef struct {
    int32_t format;
    int32_t columns;
    const KvRows* parts;
    int64_t num_parts;
    void* packed;  // as many bytes as kv_packed_bytes says
} KvPacking;

enum KvOpKind {
    KV_OP_EMBED = 0,      // weight: table; out: float [rows][columns]; factor
    KV_OP_NORM = 1,       // in: float; norm: float [columns]; factor: epsilon; out: activation, or float (stored, added)
    KV_OP_QUANTIZE = 2,   // in: float; out: activation; with a routing, of shares
    KV_OP_MATMUL = 3,     // activation in, weight, bias or NULL, float out; see epilogue
    KV_OP_ROPE_KV = 4,    // in: qkv float, rotated in place; writes the KV cache
    KV_OP_ATTENTION = 5,  // in: rotated qkv; out: float [rows][num_heads * head_dim]
    KV_OP_SELECT = 6,     // in: float [rows][columns]; out: the rows named by the batch
    // A mixture of experts: each row has num_chosen shares, one for each expert it goes to (see KvRouting).
    KV_OP_ROUTE = 7,          // in: float router logits [rows][num_experts]; writes the routing
    KV_OP_GATHER = 8,         // in: float [rows][columns]; out: activation, a row for each share
    KV_OP_EXPERT_MATMUL = 9,  // as KV_OP_MATMUL over shares, each with its expert's weight and bias
    KV_OP_COMBINE = 10,       // in: float [shares][columns]; out += factor * the weighted sum of each row's shares
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
    // gpt-oss: g = min(gate, limit), u = clamp(up, -limit, limit), out = g * sigmoid(alpha * g) * (u + 1)
    KV_CLAMPED_SWIGLU = 4,
};

enum KvCacheKind {
    KV_CACHE_F32 = 0,
    KV_CACHE_F16 = 1,
    KV_CACHE_INT8 = 2,  // -127 to 127, with a scale for each token and head
};

// A plain activation [max_rows][columns], or a quantised one in panels of KV_PANEL rows, the last of them whole.
typedef struct {
    int32_t kind;
    int32_t columns;
    void* values;       // float; or int8_t, int16_t or byte pairs [panels][bytes of a row / 4][KV_PANEL][4 bytes]
    float* scales;      // [panels][columns / 32][KV_PANEL], NULL for float
    // [panels][columns / 32][of the group, of its second half][KV_PANEL], NULL for float
    float* scaled_sums;
} KvActivationBuffer;

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;  // rotary_dim 0: no rotation
    int32_t block_size, cache_kind, window;                 // window 0: none
    int32_t rope_by_row;      // cos and sin have a row for each row of the batch, not for each position
    int32_t full_width_norm;  // q_norm and k_norm span all heads of a row together, not each alone
    float scale, soft_cap, norm_eps;  // soft_cap 0: none
    const float* cos;  // [max_position or max_rows][rotary_dim / 2]
    const float* sin;
    const float* q_norm;  // [head_dim], full width [num_heads * head_dim], or NULL
    const float* k_norm;  // [head_dim], full width [num_kv_heads * head_dim], or NULL
    const float* sinks;   // [num_heads]: a score that each query sees besides its keys, with no value; or NULL
    void* keys;
    void* values;
    float* key_scales;    // KV_CACHE_INT8 only
    float* value_scales;
} KvAttentionSpec;

// The experts of one layer, and which rows of the batch each computes in this step. A share is one of a row's
// num_chosen experts: number row * num_chosen + i. Shares lie sorted by expert, then by number.
typedef struct {
    int32_t num_experts, num_chosen;
    int32_t normalize;    // weights are a softmax over the chosen experts' logits, not over all
    int32_t reserved;
    int32_t* first_share; // [num_experts + 1]: where each expert's shares begin
    int32_t* shares;      // [max_rows * num_chosen]: numbers, sorted
    int32_t* places;      // [max_rows * num_chosen]: where each number lies
    float* weights;       // [max_rows * num_chosen], by number
} KvRouting;

typedef struct {
    int32_t kind;
    int32_t epilogue;
    int32_t columns;
    int32_t on_selected;    // the operation runs on the selected rows only
    float factor;           // multiplies the result; KV_OP_NORM: epsilon; KV_CLAMPED_SWIGLU: alpha
    float soft_cap;         // KV_STORE: c gives c * tanh(result / c), 0: none; KV_CLAMPED_SWIGLU: limit
    int32_t output_stride;  // KV_OP_MATMUL: floats from one output row to the next; 0: its own width
    const void* input;      // float buffer
    void* output;           // float buffer
    const float* norm;      // [columns], KV_OP_NORM
    const float* bias;      // [weight.rows], for experts [num_experts][weight.rows], or NULL
    const KvWeight* weight; // KV_OP_EXPERT_MATMUL: [num_experts], all of one shape
    const KvActivationBuffer* activation;  // written by NORM and QUANTIZE, read by MATMUL
    const KvAttentionSpec* attention;
    const KvRouting* routing;
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

// Logits float [num_rows][vocab_size], a row every `logits_stride` floats, and what changes them in place before they
// are sampled. All cells come first, none twice, then the penalties.
typedef struct {
    int32_t num_rows, vocab_size;
    float* logits;
    int64_t logits_stride;
    int64_t num_cells;
    const int64_t* cell_rows;   // [num_cells]
    const int64_t* cell_ids;    // [num_cells]
    const float* cell_values;   // [num_cells], added
    const float* repetition;    // [num_rows], 1: off
    const float* presence;      // [num_rows], 0: off
    const float* frequency;     // [num_rows], 0: off
    const int32_t* slots;       // [num_rows], the row of the tables that counts a row's text; -1: none; or NULL
    int32_t num_slots;
    int32_t num_deltas;         // of each row
    const int32_t* sequence;    // [num_slots][vocab_size], occurrences in prompt and output
    const int32_t* output;      // [num_slots][vocab_size], occurrences in the output
    const int32_t* delta_ids;       // [num_rows][num_deltas], -1: none; one may occur several times
    const int32_t* delta_sequence;  // [num_rows][num_deltas], what each adds to the tables
    const int32_t* delta_output;    // [num_rows][num_deltas]
} KvAdjustment;

// How rows of logits are sampled, and the tokens that were. Rows of NaN, infinity or minus infinity alone are not
// healthy and get token 0.
typedef struct {
    int32_t num_rows, vocab_size;
    const float* logits;
    int64_t logits_stride;
    const float* temperature;         // [num_rows], 0: the likeliest token, whatever the filters
    const float* min_p;               // [num_rows], 0: off
    const int32_t* top_k;             // [num_rows], 0: off
    const float* top_p;               // [num_rows], 1: off
    const uint8_t* temperature_last;  // [num_rows], the filters see the untempered distribution
    const double* uniforms;           // [num_rows] in [0, 1)
    float* probs;                     // [num_rows][vocab_size], gets what was drawn from; or NULL
    int64_t probs_stride;
    // Verification, NULL without: a draft is accepted if accept_uniform * its probability in draft_probs is less than
    // its probability, and the token is drawn from what draft_probs leave of the distribution.
    const int64_t* draft_ids;       // [num_rows], -1: no draft here
    const float* draft_probs;       // [num_rows][vocab_size]
    int64_t draft_probs_stride;
    const double* accept_uniforms;  // [num_rows]
    uint8_t* accepted;              // [num_rows]
    int64_t* token_ids;  // [num_rows]
    uint8_t* healthy;    // [num_rows]
} KvSampling;

KV_EXPORT int32_t kv_abi_version(void);
// "avx512vnni", "avx2", "neon" or "portable": the best that both the build and this processor have.
KV_EXPORT const char* kv_instruction_set(void);
// Names the instruction sets usable here, separated by spaces.
KV_EXPORT const char* kv_instruction_sets(void);
// Returns 0, or -1 if this build or this processor lacks the instruction set.
KV_EXPORT int32_t kv_use_instruction_set(const char* name);
// Starts or resizes the thread pool, the calling thread included. Returns the number in use.
KV_EXPORT int32_t kv_set_num_threads(int32_t num_threads);
// Bytes of a packed matrix, or -1 for a shape or format that is not known.
KV_EXPORT int64_t kv_packed_bytes(int32_t format, int64_t rows, int32_t columns);
// Packs matrices on all threads. Returns 0, or -1 - i where matrix i has a shape or format that is not known; none is
// packed then.
KV_EXPORT int32_t kv_pack(const KvPacking* matrices, int32_t num_matrices);
// Writes weight rows first..first+count as float [count][columns].
KV_EXPORT int32_t kv_dequantize(const KvWeight* weight, int32_t first, int32_t count, float* out);
// Returns 0, or -1 - i when operation i asks for something that this library does not do.
KV_EXPORT int32_t kv_check(const KvOp* ops, int32_t num_ops);
// Runs operations that were checked, in order. Calls from several threads take turns.
KV_EXPORT void kv_run(const KvOp* ops, int32_t num_ops, const KvBatch* batch);
// The same, adding the nanoseconds each operation took to nanoseconds[num_ops].
KV_EXPORT void kv_run_profiled(const KvOp* ops, int32_t num_ops, const KvBatch* batch, int64_t* nanoseconds);
// out [num_rows][rows] = x [num_rows][columns] @ weight.T + bias or NULL, x quantised to `activation` on the way.
// Returns 0, or -1 for what this library does not do.
KV_EXPORT int32_t kv_matmul(const KvWeight* weight, int32_t activation, const float* x, int32_t num_rows,
                            const float* bias, float* out);
// Both return 0, or -1 for a cell, slot or draft that is out of range; nothing is changed then.
KV_EXPORT int32_t kv_adjust_logits(const KvAdjustment* adjustment);
KV_EXPORT int32_t kv_sample(const KvSampling* sampling);
// Runs the operations, whose last write the logits that are sampled from, num_steps times; what a step draws, the next
// one reads, one place further on, and the batch's numbers move on with it. Every sequence has one row, and that is
// selected; block_tables reach to the last step's places. uniforms, token_ids and healthy are [num_steps][num_rows].
// nanoseconds is NULL or [num_ops + 1], for what kv_run_profiled adds, and sampling. Returns 0, or -1 for other batches.
KV_EXPORT int32_t kv_run_steps(const KvOp* ops, int32_t num_ops, const KvBatch* batch, const KvSampling* sampling,
                               int32_t num_steps, int32_t block_size, int64_t* nanoseconds);

#ifdef __cplusplus
}
#endif
