/* SPDX-License-Identifier: Apache-2.0
 *
 * kvpolicy for C and for every language that calls C: plans from JSON, the KV cache of one sequence,
 * attention on the CPU. Part of the compiled library (target kvpolicy::compiled).
 *
 *     kvp_plan* plan = NULL;
 *     kvp_cache* cache = NULL;
 *     if (kvp_plan_from_json(text, strlen(text), KVP_BFLOAT16, &plan) != KVP_OK ||
 *         kvp_cache_new(plan, NULL, &cache) != KVP_OK) {
 *       fprintf(stderr, "%s\n", kvp_error());
 *     }
 *
 * Every function that can fail returns a kvp_status; KVP_OK is 0. After another status the object is
 * as it was before the call, what `out` points to is untouched, and `kvp_error` says what was wrong,
 * the value, and what would fit. No C++ exception leaves the library. Null handles are refused with
 * KVP_CONFIG_ERROR, except by the `_free` functions, which do nothing with them.
 *
 * Calls on one cache must not overlap; different caches, forks among them, may be used on different
 * threads. Any number of threads may use one plan. Structures only grow at their end: set `size` to
 * their sizeof, so that a library of a later version knows what the caller knows.
 */
#ifndef KVPOLICY_C_H
#define KVPOLICY_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors */

/* Integers of 32 bits, whatever width a compiler gives an enum: a value of no name can be passed, and
 * is refused. */
typedef int32_t kvp_status;
enum {
  KVP_OK = 0,
  KVP_CONFIG_ERROR = 1,   /* settings that do not work, alone or together */
  KVP_SHAPE_ERROR = 2,    /* a tensor, a layer or a token that does not fit */
  KVP_CAPACITY_ERROR = 3, /* more tokens or rows than were made room for */
  KVP_ROLLBACK_ERROR = 4, /* rows that are committed already, or not there yet */
  KVP_FORMAT_ERROR = 5,   /* a plan or a saved cache that cannot be read as one */
  KVP_STORAGE_ERROR = 6,  /* a file that cannot be read or written */
  KVP_DEVICE_ERROR = 7,   /* a device or a call of its runtime */
  KVP_OUT_OF_MEMORY = 8,
  KVP_OTHER_ERROR = 9
};

/* What the latest failed call of this thread said. Valid until the thread's next failed call. */
const char* kvp_error(void);
/* "ConfigError", ...; "ok" for KVP_OK. */
const char* kvp_status_name(kvp_status status);
/* The library's version, "0.1.0". */
const char* kvp_version(void);

/* ---- plans */

/* The type of the rows that a cache keeps exact, and of tensors. */
typedef int32_t kvp_dtype;
enum { KVP_FLOAT32 = 0, KVP_FLOAT16 = 1, KVP_BFLOAT16 = 2 };

typedef struct kvp_shape {
  size_t layers, q_heads, kv_heads, head_dim;
} kvp_shape;

/* One layer of a model: kv_heads is 0 where it has no cache of its own, value_dim the channels of a
 * value and of an output, window 0 where it attends to all tokens, reads the number of the layer
 * whose cache it reads (its own, as a rule). */
typedef struct kvp_layer {
  size_t q_heads, kv_heads, head_dim, value_dim, window, reads;
} kvp_layer;

typedef struct kvp_plan kvp_plan;

/* A plan file's text (docs/formats.md), for a cache whose exact rows are of `dtype`. */
kvp_status kvp_plan_from_json(const char* text, size_t bytes, kvp_dtype dtype, kvp_plan** out);
/* Every head keeps every row. */
kvp_status kvp_plan_full(const kvp_shape* shape, kvp_dtype dtype, kvp_plan** out);
/* The plan file's text, with a final zero. `*bytes`, without the zero, is always set; where `text` is
 * null nothing else happens, and a buffer of fewer than *bytes + 1 is KVP_CAPACITY_ERROR. */
kvp_status kvp_plan_to_json(const kvp_plan* plan, char* text, size_t capacity, size_t* bytes);
/* Where layers differ, all but `layers` are 0: ask for each layer. */
kvp_status kvp_plan_shape(const kvp_plan* plan, kvp_shape* out);
/* Model layer `layer`; KVP_CONFIG_ERROR if there is none. */
kvp_status kvp_plan_layer(const kvp_plan* plan, size_t layer, kvp_layer* out);
void kvp_plan_free(kvp_plan* plan);

/* ---- caches */

typedef struct kvp_cache_options {
  size_t size;         /* sizeof(kvp_cache_options) */
  size_t max_rollback; /* latest rows that kvp_cache_truncate can take back; 0 */
  size_t max_append;   /* most rows of one kvp_cache_append; 1 */
  size_t max_tokens;   /* most tokens; 0: as many as memory holds */
  size_t kept_queries; /* latest queries that every layer keeps, for kvp_cache_fork_as; 0 */
  size_t page_rows;    /* rows of a page, a power of two from 16 to 4096; 64 */
  size_t threads;      /* threads of a call; 0: as many as the machine runs at once */
} kvp_cache_options;

/* The defaults, which stand above. */
void kvp_cache_options_init(kvp_cache_options* options);

/* Bytes that a cache under the plan holds once it was fed `tokens` tokens; `compressed`: after its heads
 * with a budget have dropped rows. */
kvp_status kvp_plan_memory(const kvp_plan* plan, size_t tokens, const kvp_cache_options* options,
                           int compressed, size_t* bytes);

typedef struct kvp_cache kvp_cache;

/* A cache of one sequence, all layers. Null options are the defaults. */
kvp_status kvp_cache_new(const kvp_plan* plan, const kvp_cache_options* options, kvp_cache** out);
void kvp_cache_free(kvp_cache* cache);

/* [tokens, heads, head_dim]; strides in elements, 0 for packed rows. Elements of one row are
 * neighbours. */
typedef struct kvp_tensor {
  void* data; /* not written where the call only reads */
  kvp_dtype dtype;
  size_t tokens, heads, head_dim;
  size_t token_stride, head_stride;
} kvp_tensor;

typedef struct kvp_attend_options {
  size_t size;              /* sizeof(kvp_attend_options) */
  float scale;              /* of the logits; 0: 1 / sqrt(head_dim) */
  float softcap;            /* logit -> cap * tanh(logit / cap); 0: none */
  const float* attention_sink_bias; /* [q_heads], a logit that weighs and has no value; null: none */
  float* log_sum_exp;       /* [tokens, q_heads], written; null: not wanted */
  int read_selected;        /* heads that select read their chunks; 0: every row */
  int refresh_selection;    /* such heads choose again: before a selected read, after any other */
} kvp_attend_options;

/* All zero but for `size`. */
void kvp_attend_options_init(kvp_attend_options* options);

/* Attends the queries of one layer to all cached rows and to the call's own, causally; then the
 * call's rows join the cache. q [tokens, q_heads, head_dim], k [tokens, kv_heads, head_dim], v
 * [tokens, kv_heads, value_dim], out [tokens, q_heads, value_dim]; keys are rotated already; `out`
 * does not overlap the inputs. Null options are the defaults. */
kvp_status kvp_cache_step(kvp_cache* cache, size_t layer, const kvp_tensor* q, const kvp_tensor* k,
                          const kvp_tensor* v, const kvp_tensor* out,
                          const kvp_attend_options* options);
/* The two halves of a step, for engines that work in between. */
kvp_status kvp_cache_append(kvp_cache* cache, size_t layer, const kvp_tensor* k,
                            const kvp_tensor* v);
kvp_status kvp_cache_attend(kvp_cache* cache, size_t layer, const kvp_tensor* q,
                            const kvp_tensor* out, const kvp_attend_options* options);

/* Takes back the rows from text position `tokens` on. */
kvp_status kvp_cache_truncate(kvp_cache* cache, size_t tokens);
/* Hands all rows that may still be taken back to the policies. */
kvp_status kvp_cache_commit(kvp_cache* cache);
/* Commits, then heads with a budget drop the rows that they rank lowest. */
kvp_status kvp_cache_compress(kvp_cache* cache);
/* Forgets the text. */
kvp_status kvp_cache_clear(kvp_cache* cache);

/* A cache with the same rows, which shares full pages. */
kvp_status kvp_cache_fork(const kvp_cache* cache, kvp_cache** out);
/* The same tokens under another plan of the same shape and dtype. */
kvp_status kvp_cache_fork_as(const kvp_cache* cache, const kvp_plan* plan, kvp_cache** out);

/* To a file, which is replaced as a whole; `tag` (null: none) must be the same when it is loaded. */
kvp_status kvp_cache_save(const kvp_cache* cache, const char* path, const char* tag);
/* The cache becomes what was saved under the same plan. */
kvp_status kvp_cache_load(kvp_cache* cache, const char* path, const char* tag);

typedef struct kvp_cache_info {
  size_t size;           /* sizeof(kvp_cache_info); set by the caller */
  size_t tokens;         /* that every layer has seen */
  size_t commit_point;   /* kvp_cache_truncate goes back no further */
  size_t bytes;          /* of row memory, pages shared with forks in full */
  size_t shared_bytes;   /* of them, shared with forks */
  size_t overhead_bytes; /* bookkeeping besides */
} kvp_cache_info;

kvp_status kvp_cache_get_info(const kvp_cache* cache, kvp_cache_info* info);

#ifdef __cplusplus
}
#endif

#endif
