/* SPDX-License-Identifier: Apache-2.0
 *
 * kvpolicy for C and for every language that calls C: plans from names and JSON, the KV cache of one sequence,
 * attention on the CPU. Part of the compiled library (target kvpolicy::compiled).
 *
 *     kvp_plan* plan = NULL;
 *     kvp_cache* cache = NULL;
 *     if (kvp_plan_from_json(text, strlen(text), KVP_BFLOAT16, &plan) != KVP_OK ||
 *         kvp_cache_new(plan, NULL, &cache) != KVP_OK) {
 *       fprintf(stderr, "%s\n", kvp_error());
 *     }
 *
 * Every function that can fail returns a kvp_status; KVP_OK is 0. After any other status the object
 * is unchanged, the target of `out` is not written, and `kvp_error` says what was wrong, which value
 * was met and what would fit. No C++ exception leaves the library. Null handles are refused with
 * KVP_CONFIG_ERROR, except by the `_free` functions, which ignore them.
 *
 * Calls on one cache must not overlap; different caches, forks included, may be used on different
 * threads. Any number of threads may use one plan. Later versions add members only at the end of the
 * structures that have a `size`: set it to the structure's sizeof, so that a later library knows which
 * members the caller has. Members that an older library does not know must be 0. The other structures
 * stay as they are.
 */
#ifndef KVPOLICY_C_H
#define KVPOLICY_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors */

/* A 32-bit integer, because compilers differ in the width of an enum. */
typedef int32_t kvp_status;
enum {
  KVP_OK = 0,
  KVP_CONFIG_ERROR = 1,   /* settings that do not work */
  KVP_SHAPE_ERROR = 2,    /* a tensor, a layer or a token that does not fit */
  KVP_CAPACITY_ERROR = 3, /* more tokens or rows than a cache was made for */
  KVP_ROLLBACK_ERROR = 4, /* a text length that cannot be returned to */
  KVP_FORMAT_ERROR = 5,   /* text or a file that is no plan or no saved cache */
  KVP_STORAGE_ERROR = 6,  /* a file that cannot be read or written */
  KVP_DEVICE_ERROR = 7,   /* a device, or a call of its runtime, failed */
  KVP_OUT_OF_MEMORY = 8,  /* for now: the same call can succeed once memory is given back */
  KVP_OTHER_ERROR = 9
};

/* The message of the latest failed call of this thread. Valid until the thread's next failed call. */
const char* kvp_error(void);
/* The name of a status: "ConfigError", ...; "ok" for KVP_OK. */
const char* kvp_status_name(kvp_status status);
/* The library's version, such as "0.1.0". */
const char* kvp_version(void);

/* ---- plans */

/* The element type of tensors and of the rows that a cache keeps exact. */
typedef int32_t kvp_dtype;
enum { KVP_FLOAT32 = 0, KVP_FLOAT16 = 1, KVP_BFLOAT16 = 2 };

typedef struct kvp_shape {
  size_t layers, q_heads, kv_heads, head_dim;
} kvp_shape;

/* One layer of a model. kv_heads is 0 if the layer has no cache of its own; value_dim are the channels
 * of a value and of an output; window is 0 if the layer attends to all tokens; reads is the number of
 * the layer whose cache it reads (usually its own). */
typedef struct kvp_layer {
  size_t q_heads, kv_heads, head_dim, value_dim, window, reads;
} kvp_layer;

typedef struct kvp_plan kvp_plan;

/* Reads a plan from the text of a plan file (docs/formats.md), for a cache whose exact rows have `dtype`. */
kvp_status kvp_plan_from_json(const char* text, size_t bytes, kvp_dtype dtype, kvp_plan** out);
/* Makes the plan that a name names, for a model of the given shape:
 *
 *     full                 every row, exact
 *     int4                 every row in so many bits, the first 4 and the latest 128 exact; int4:64 for 64;
 *                          also int8, int6, int5, int3, int2
 *     k8v4                 the same with keys of 8 bits and values of 4, and so on
 *     hf4  hf2             groups of 64 in a row, the latest 128 exact (transformers' QuantizedCache)
 *     fp8  mxfp4  nvfp4    every row in such numbers; fp8:scale=0.5 for the scale of a head
 *     sink_recent:16,128   the first 16 rows and the latest 128
 *     duo@PATH:0.5         half of the heads stream, by the gates in the folder of a DuoAttention pattern
 *     duo+int4@PATH:0.5    the same; the heads that keep every row keep it as int4 does
 *     PATH.json            a plan file, which must be for this shape
 *
 * What is quantised takes settings after its numbers, as in int4:64,hadamard=both: hadamard=none|keys|values|both,
 * keys=channel|token, key_group=64, group=64, residual=128, sinks=4, normal=none|keys|values|both, and of int8
 * halves=no|yes (kvpolicy/io/named_plan.hpp). Below 8 bits keys
 * share a scale among key_group rows, which must divide page_rows: 64 (2 bits: 32) unless the name says otherwise.
 *
 * KVP_CONFIG_ERROR for a name that is not known, a setting that does not work or a file for another shape;
 * KVP_FORMAT_ERROR for a file that cannot be read. */
kvp_status kvp_plan_from_name(const char* name, const kvp_shape* shape, kvp_dtype dtype, kvp_plan** out);
/* A plan under which every head keeps every row. */
kvp_status kvp_plan_full(const kvp_shape* shape, kvp_dtype dtype, kvp_plan** out);
/* Writes the plan as the text of a plan file, with a final zero. `*bytes`, which does not count the
 * zero, is set also with KVP_CAPACITY_ERROR; if `text` is null, nothing else happens. KVP_CAPACITY_ERROR if `capacity` is less
 * than *bytes + 1. */
kvp_status kvp_plan_to_json(const kvp_plan* plan, char* text, size_t capacity, size_t* bytes);
/* The shape of the plan's model. If layers differ, all members but `layers` are 0: use kvp_plan_layer. */
kvp_status kvp_plan_shape(const kvp_plan* plan, kvp_shape* out);
/* The shape of layer `layer`; KVP_CONFIG_ERROR if there is no such layer. */
kvp_status kvp_plan_layer(const kvp_plan* plan, size_t layer, kvp_layer* out);
void kvp_plan_free(kvp_plan* plan);

/* ---- caches */

typedef struct kvp_cache_options {
  size_t size;         /* sizeof(kvp_cache_options) */
  size_t max_rollback; /* latest rows that kvp_cache_truncate can take back; default 0 */
  size_t max_append;   /* most rows of one kvp_cache_append; default 1 */
  size_t max_tokens;   /* most tokens; 0 (default): as many as memory holds */
  size_t kept_queries; /* latest queries kept by every layer, for kvp_cache_fork_as; default 0 */
  size_t page_rows;    /* rows of a page, a power of two from 16 to 4096; default 64. int4 and other names of less than
                          8 bits need 64 or more, or a smaller group: int4:128,key_group=16 */
  size_t threads;      /* threads of a call, at most 1024; 0 (default): as many as the machine has. A library
                          that was built without OpenMP uses one. */
} kvp_cache_options;

/* Sets all members to the defaults listed above. `size`: sizeof(kvp_cache_options), as the caller knows it. */
void kvp_cache_options_init(kvp_cache_options* options, size_t size);

/* Bytes that a cache under the plan holds after `tokens` tokens. If `compressed` is not 0, heads with a
 * budget count as compressed. Null options are the defaults. */
kvp_status kvp_plan_memory(const kvp_plan* plan, size_t tokens, const kvp_cache_options* options,
                           int compressed, size_t* bytes);

typedef struct kvp_cache kvp_cache;

/* Makes a cache for all layers of one sequence. Null options are the defaults. */
kvp_status kvp_cache_new(const kvp_plan* plan, const kvp_cache_options* options, kvp_cache** out);
void kvp_cache_free(kvp_cache* cache);

/* A tensor [tokens, heads, head_dim]. Strides are in elements, 0 for contiguous rows; the elements of one
 * row are contiguous. */
typedef struct kvp_tensor {
  void* data; /* aligned to its element type; not written if the call only reads */
  kvp_dtype dtype;
  size_t tokens, heads, head_dim;
  size_t token_stride, head_stride;
} kvp_tensor;

/* What a call reads of the cached rows. */
typedef int32_t kvp_read;
enum {
  KVP_READ_ALL = 0,
  KVP_READ_SELECTED = 1,   /* ChunkRetrieval heads read their selection */
  KVP_READ_UPPER_HALF = 2, /* of codes in halves the upper 4 bits, as a draft does ("int8:halves=yes") */
  KVP_READ_BOUNDED = 3     /* of rows in halves those that can matter, by `epsilon`; all of other rows */
};

/* What a bound of a KVP_READ_BOUNDED call is worth. */
typedef int32_t kvp_certainty;
enum {
  KVP_SURE = 0,       /* the bound holds */
  KVP_FOUR_SIGMA = 1, /* it is an estimate by four standard deviations */
  KVP_NO_MARGIN = 2   /* the upper halves are taken for the keys */
};

typedef struct kvp_attend_options {
  size_t size;                      /* sizeof(kvp_attend_options) */
  float scale;                      /* multiplies logits; 0: 1 / sqrt(head_dim) */
  float softcap;                    /* logit -> cap * tanh(logit / cap); 0: none */
  const float* attention_sink_bias; /* [q_heads], learned logits without a value; null: none */
  float* log_sum_exp;               /* [tokens, q_heads], written; null: not wanted */
  kvp_read read;                    /* KVP_READ_ALL (default), ... */
  int refresh_selection; /* ChunkRetrieval heads choose a new selection: before a selected read, after any other */
  /* The others are for KVP_READ_BOUNDED; of any other read `unread` and `rows_read` must be null. */
  float epsilon;           /* the rows left unread hold at most this share of a query's attention; 0: all are read */
  kvp_certainty certainty; /* KVP_SURE (default), ... */
  size_t most_rows;        /* rows in halves that are read in full for a KV head, at most; 0: any number */
  float* unread;     /* [tokens, q_heads], written: the share that unread rows hold at most; null: not wanted */
  size_t* rows_read; /* [kv_heads], increased by the rows that are read in full; null: not wanted */
} kvp_attend_options;

/* Sets `size` to the given sizeof(kvp_attend_options) and all other members to 0. */
void kvp_attend_options_init(kvp_attend_options* options, size_t size);

/* The queries of one layer attend to all cached rows and, causally, to the call's own; then the call's
 * rows join the cache. q [tokens, q_heads, head_dim], k [tokens, kv_heads, head_dim], v [tokens,
 * kv_heads, value_dim], out [tokens, q_heads, value_dim]. Queries and keys must be rotated already; `out`
 * must not overlap the inputs. Null options are the defaults. */
kvp_status kvp_cache_step(kvp_cache* cache, size_t layer, const kvp_tensor* q, const kvp_tensor* k,
                          const kvp_tensor* v, const kvp_tensor* out, const kvp_attend_options* options);
/* The two halves of a step, for engines that do other work between them. */
kvp_status kvp_cache_append(kvp_cache* cache, size_t layer, const kvp_tensor* k, const kvp_tensor* v);
kvp_status kvp_cache_attend(kvp_cache* cache, size_t layer, const kvp_tensor* q, const kvp_tensor* out,
                            const kvp_attend_options* options);

/* Takes back all rows from text position `tokens` on. */
kvp_status kvp_cache_truncate(kvp_cache* cache, size_t tokens);
/* Hands all tentative rows to the policies; they cannot be taken back any more. */
kvp_status kvp_cache_commit(kvp_cache* cache);
/* Commits; then heads with a budget drop the rows that they rank lowest. */
kvp_status kvp_cache_compress(kvp_cache* cache);
/* Drops all rows; the cache is then as new. */
kvp_status kvp_cache_clear(kvp_cache* cache);

/* Makes a second cache with the same rows, which shares full pages with the first. */
kvp_status kvp_cache_fork(const kvp_cache* cache, kvp_cache** out);
/* Makes a cache of the same text under another plan of the same shape and dtype. */
kvp_status kvp_cache_fork_as(const kvp_cache* cache, const kvp_plan* plan, kvp_cache** out);

/* Saves the cache to a file, which is replaced as a whole. Loading requires the same `tag` (null: none). */
kvp_status kvp_cache_save(const kvp_cache* cache, const char* path, const char* tag);
/* Replaces the contents of the cache by what was saved from a cache under the same plan. */
kvp_status kvp_cache_load(kvp_cache* cache, const char* path, const char* tag);

typedef struct kvp_cache_info {
  size_t size;           /* sizeof(kvp_cache_info); set by the caller */
  size_t tokens;         /* tokens that every layer has seen */
  size_t commit_point;   /* the smallest length that kvp_cache_truncate accepts */
  size_t bytes;          /* memory for rows; pages shared with forks count in full */
  size_t shared_bytes;   /* the part of `bytes` that is shared with forks */
  size_t overhead_bytes; /* bookkeeping, not part of `bytes` */
} kvp_cache_info;

kvp_status kvp_cache_get_info(const kvp_cache* cache, kvp_cache_info* info);

#ifdef __cplusplus
}
#endif

#endif
