/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface, used as a C program would: a plan from JSON, prefill and decode against softmax
 * attention written out here in double, rollback, forks, files and refusals. */
#include <kvpolicy/c.h>

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { q_heads = 4, kv_heads = 2, head_dim = 64, group = q_heads / kv_heads, most_tokens = 200 };

static int failures = 0;

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      ++failures;                                                                \
      printf("%s:%d: failed: %s (%s)\n", __FILE__, __LINE__, #condition, kvp_error()); \
    }                                                                            \
  } while (0)

/* Head 0 keeps every row, head 1 the first 2 and a window of 5. */
static const char* const plan_text =
    "{\"format\": \"kvpolicy plan\", \"version\": 1,"
    " \"shape\": {\"layers\": 1, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 64},"
    " \"settings\": [{\"policy\": \"full\"},"
    "                {\"policy\": \"sink_recent\", \"sinks\": 2, \"recent\": 5}],"
    " \"heads\": [[0, 1]]}";

static float keys[most_tokens * kv_heads * head_dim];
static float values[most_tokens * kv_heads * head_dim];
static float queries[most_tokens * q_heads * head_dim];
static float outputs[most_tokens * q_heads * head_dim];

static float draw(void) {
  static unsigned state = 12345;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / (float)(1u << 23) - 1.0F;
}

static kvp_tensor tensor(float* data, size_t tokens, size_t heads) {
  kvp_tensor made;
  memset(&made, 0, sizeof made);
  made.data = data;
  made.dtype = KVP_FLOAT32;
  made.tokens = tokens;
  made.heads = heads;
  made.head_dim = head_dim;
  return made;
}

static int is_seen(int kv_head, int row, int query) {
  if (row > query) return 0;
  return kv_head == 0 || row < 2 || row > query - 5;
}

/* The largest difference of the outputs of tokens [first, first + count) from exact attention. */
static double error_of(int first, int count) {
  double worst = 0.0;
  for (int t = first; t < first + count; ++t) {
    for (int h = 0; h < q_heads; ++h) {
      const float* q = queries + (t * q_heads + h) * head_dim;
      double weights[most_tokens];
      double sum = 0.0;
      for (int row = 0; row <= t; ++row) {
        const float* k = keys + (row * kv_heads + h / group) * head_dim;
        double logit = 0.0;
        for (int d = 0; d < head_dim; ++d) logit += (double)q[d] * (double)k[d];
        weights[row] = is_seen(h / group, row, t) ? exp(logit / sqrt((double)head_dim)) : 0.0;
        sum += weights[row];
      }
      for (int d = 0; d < head_dim; ++d) {
        double expected = 0.0;
        for (int row = 0; row <= t; ++row) {
          expected += weights[row] / sum *
                      (double)values[(row * kv_heads + h / group) * head_dim + d];
        }
        const double off = fabs(expected - (double)outputs[(t * q_heads + h) * head_dim + d]);
        if (!(off <= worst)) worst = off; /* NaN is worse */
      }
    }
  }
  return worst;
}

static kvp_status step(kvp_cache* cache, int first, int count) {
  const kvp_tensor q = tensor(queries + first * q_heads * head_dim, (size_t)count, q_heads);
  const kvp_tensor k = tensor(keys + first * kv_heads * head_dim, (size_t)count, kv_heads);
  const kvp_tensor v = tensor(values + first * kv_heads * head_dim, (size_t)count, kv_heads);
  const kvp_tensor out = tensor(outputs + first * q_heads * head_dim, (size_t)count, q_heads);
  return kvp_cache_step(cache, 0, &q, &k, &v, &out, NULL);
}

static kvp_cache_info info_of(const kvp_cache* cache) {
  kvp_cache_info info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  CHECK(kvp_cache_get_info(cache, &info) == KVP_OK);
  return info;
}

static void test_attention(const kvp_plan* plan) {
  kvp_cache* cache = NULL;
  kvp_cache_options options;
  kvp_cache_options_init(&options, sizeof options);
  options.max_rollback = 4;
  options.threads = 2;
  CHECK(kvp_cache_new(plan, &options, &cache) == KVP_OK);
  CHECK(step(cache, 0, 150) == KVP_OK);
  for (int t = 150; t < 170; ++t) CHECK(step(cache, t, 1) == KVP_OK);
  CHECK(error_of(0, 170) < 1e-5);
  CHECK(info_of(cache).tokens == 170);
  CHECK(info_of(cache).commit_point == 166);

  CHECK(kvp_cache_truncate(cache, 165) == KVP_ROLLBACK_ERROR);
  CHECK(strstr(kvp_error(), "165") != NULL);
  CHECK(kvp_cache_truncate(cache, 167) == KVP_OK);
  CHECK(info_of(cache).tokens == 167);

  kvp_cache* fork = NULL;
  CHECK(kvp_cache_fork(cache, &fork) == KVP_OK);
  memset(outputs, 0, sizeof outputs);
  CHECK(step(fork, 167, 3) == KVP_OK);
  CHECK(info_of(cache).tokens == 167);
  kvp_cache_free(cache);
  CHECK(step(fork, 170, 1) == KVP_OK);
  CHECK(error_of(167, 4) < 1e-5);
  CHECK(info_of(fork).shared_bytes == 0);
  CHECK(info_of(fork).overhead_bytes > 0);

  const char* path = "c_interface_test.kvcache";
  kvp_cache* loaded = NULL;
  CHECK(kvp_cache_save(fork, path, "the text") == KVP_OK);
  CHECK(kvp_cache_new(plan, &options, &loaded) == KVP_OK);
  CHECK(kvp_cache_load(loaded, path, "another text") == KVP_FORMAT_ERROR);
  CHECK(info_of(loaded).tokens == 0);
  CHECK(kvp_cache_load(loaded, path, "the text") == KVP_OK);
  memset(outputs, 0, sizeof outputs);
  CHECK(step(loaded, 171, 2) == KVP_OK);
  CHECK(error_of(171, 2) < 1e-5);
  CHECK(remove(path) == 0);
  CHECK(kvp_cache_load(loaded, path, NULL) == KVP_STORAGE_ERROR);
  CHECK(kvp_cache_clear(loaded) == KVP_OK);
  CHECK(info_of(loaded).tokens == 0);
  kvp_cache_free(loaded);
  kvp_cache_free(fork);
}

static void test_halves(const kvp_plan* plan) {
  kvp_cache* cache = NULL;
  CHECK(kvp_cache_new(plan, NULL, &cache) == KVP_OK);
  for (int t = 0; t < 70; ++t) {
    const kvp_tensor k = tensor(keys + t * kv_heads * head_dim, 1, kv_heads);
    const kvp_tensor v = tensor(values + t * kv_heads * head_dim, 1, kv_heads);
    const kvp_tensor q = tensor(queries + t * q_heads * head_dim, 1, q_heads);
    const kvp_tensor out = tensor(outputs + t * q_heads * head_dim, 1, q_heads);
    CHECK(kvp_cache_append(cache, 0, &k, &v) == KVP_OK);
    CHECK(kvp_cache_attend(cache, 0, &q, &out, NULL) == KVP_OK);
  }
  CHECK(error_of(0, 70) < 1e-5);
  CHECK(kvp_cache_commit(cache) == KVP_OK);
  CHECK(kvp_cache_compress(cache) == KVP_OK); /* no head has a budget */
  CHECK(info_of(cache).tokens == 70);
  kvp_cache_free(cache);
}

/* The attention of query token `t` over rows in halves, read in a way; returns the status. */
static kvp_status attend_as(kvp_cache* cache, int t, const kvp_attend_options* options) {
  const kvp_tensor q = tensor(queries + t * q_heads * head_dim, 1, q_heads);
  const kvp_tensor out = tensor(outputs, 1, q_heads);
  return kvp_cache_attend(cache, 0, &q, &out, options);
}

static double distance(const float* a, const float* b, int count) {
  double most = 0;
  for (int i = 0; i < count; ++i) most = fmax(most, fabs((double)a[i] - (double)b[i]));
  return most;
}

static void test_reads(void) {
  enum { rows = 150, size = q_heads * head_dim };
  const kvp_shape shape = {1, q_heads, kv_heads, head_dim};
  kvp_plan* plan = NULL;
  CHECK(kvp_plan_from_name("int8:16,halves=yes", &shape, KVP_FLOAT32, &plan) == KVP_OK);
  kvp_cache* cache = NULL;
  kvp_cache_options cached;
  kvp_cache_options_init(&cached, sizeof cached);
  cached.max_append = rows;
  CHECK(kvp_cache_new(plan, &cached, &cache) == KVP_OK);
  /* Only the latest rows of the text may have queries. */
  const size_t last = (size_t)(rows - 1) * kv_heads * head_dim;
  kvp_tensor k = tensor(keys, rows - 1, kv_heads);
  kvp_tensor v = tensor(values, rows - 1, kv_heads);
  CHECK(kvp_cache_append(cache, 0, &k, &v) == KVP_OK);
  CHECK(kvp_cache_commit(cache) == KVP_OK);
  k = tensor(keys + last, 1, kv_heads);
  v = tensor(values + last, 1, kv_heads);
  CHECK(kvp_cache_append(cache, 0, &k, &v) == KVP_OK);

  static float all[size], upper[size], bounded[size];
  float unread[q_heads] = {-1, -1, -1, -1};
  size_t rows_read[kv_heads] = {0, 0};
  kvp_attend_options options;
  kvp_attend_options_init(&options, sizeof options);
  CHECK(attend_as(cache, rows - 1, NULL) == KVP_OK);
  memcpy(all, outputs, sizeof all);
  options.read = KVP_READ_UPPER_HALF;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_OK);
  memcpy(upper, outputs, sizeof upper);
  CHECK(distance(all, upper, size) > 1e-4 && distance(all, upper, size) < 0.2);

  options.read = KVP_READ_BOUNDED;
  options.epsilon = 0.3F;
  options.unread = unread;
  options.rows_read = rows_read;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_OK);
  memcpy(bounded, outputs, sizeof bounded);
  for (int h = 0; h < q_heads; ++h) CHECK(unread[h] >= 0 && unread[h] <= 0.3F);
  for (int h = 0; h < kv_heads; ++h) CHECK(rows_read[h] > 0 && rows_read[h] <= rows);
  /* Values are between -1 and 1. */
  CHECK(distance(all, bounded, size) <= 2 * 0.3 + 1e-3);
  /* So do estimates. */
  for (kvp_certainty certainty = KVP_FOUR_SIGMA; certainty <= KVP_NO_MARGIN; ++certainty) {
    options.certainty = certainty;
    unread[0] = -1;
    CHECK(attend_as(cache, rows - 1, &options) == KVP_OK);
    CHECK(unread[0] >= 0 && unread[0] <= 0.3F);
    CHECK(distance(all, outputs, size) <= 2 * 0.3 + 1e-2);
  }
  options.certainty = KVP_SURE;
  /* A caller that knows the options up to `refresh_selection`. */
  kvp_attend_options older;
  kvp_attend_options_init(&older, offsetof(kvp_attend_options, epsilon));
  older.read = KVP_READ_UPPER_HALF;
  CHECK(attend_as(cache, rows - 1, &older) == KVP_OK);
  CHECK(distance(upper, outputs, size) == 0);
  /* Few rows end it early, and the bound says so. */
  options.most_rows = 8;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_OK);
  CHECK(unread[0] > 0.3F);
  options.most_rows = 0;
  options.epsilon = 0;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_OK);
  CHECK(distance(all, outputs, size) < 1e-4 && unread[0] == 0);

  options.epsilon = 2;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_SHAPE_ERROR);
  options.epsilon = 0;
  options.certainty = 3;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_CONFIG_ERROR);
  CHECK(strstr(kvp_error(), "certainty is 3") != NULL);
  options.certainty = KVP_SURE;
  options.read = 4;
  CHECK(attend_as(cache, rows - 1, &options) == KVP_CONFIG_ERROR);
  CHECK(strstr(kvp_error(), "read is 4") != NULL);
  options.read = KVP_READ_ALL; /* which has no bound to write */
  CHECK(attend_as(cache, rows - 1, &options) == KVP_SHAPE_ERROR);
  kvp_cache_free(cache);
  kvp_plan_free(plan);
}

static void test_plans(const kvp_plan* plan) {
  kvp_shape shape;
  CHECK(kvp_plan_shape(plan, &shape) == KVP_OK);
  CHECK(shape.layers == 1 && shape.q_heads == 4 && shape.kv_heads == 2 && shape.head_dim == 64);
  size_t bytes = 0;
  CHECK(kvp_plan_to_json(plan, NULL, 0, &bytes) == KVP_OK);
  char* text = malloc(bytes + 1);
  CHECK(kvp_plan_to_json(plan, text, bytes, &bytes) == KVP_CAPACITY_ERROR);
  CHECK(kvp_plan_to_json(plan, text, bytes + 1, &bytes) == KVP_OK);
  CHECK(strlen(text) == bytes);
  kvp_plan* again = NULL;
  CHECK(kvp_plan_from_json(text, bytes, KVP_FLOAT32, &again) == KVP_OK);
  free(text);

  kvp_plan* full = NULL;
  CHECK(kvp_plan_full(&shape, KVP_FLOAT32, &full) == KVP_OK);
  size_t of_full = 0, of_plan = 0;
  CHECK(kvp_plan_memory(full, 1024, NULL, 0, &of_full) == KVP_OK);
  CHECK(kvp_plan_memory(again, 1024, NULL, 0, &of_plan) == KVP_OK);
  CHECK(of_full > of_plan);

  kvp_cache* cache = NULL;
  CHECK(kvp_cache_new(full, NULL, &cache) == KVP_OK);
  CHECK(step(cache, 0, 190) == KVP_OK);
  kvp_cache* other = NULL;
  CHECK(kvp_cache_fork_as(cache, again, &other) == KVP_OK);
  CHECK(info_of(other).tokens == 190);
  CHECK(info_of(other).bytes < info_of(cache).bytes);
  memset(outputs, 0, sizeof outputs);
  CHECK(step(other, 190, 1) == KVP_OK);
  CHECK(error_of(190, 1) < 1e-5);
  kvp_plan* half_plan = NULL;
  CHECK(kvp_plan_full(&shape, KVP_FLOAT16, &half_plan) == KVP_OK);
  kvp_cache* none = NULL;
  CHECK(kvp_cache_fork_as(cache, half_plan, &none) == KVP_CONFIG_ERROR && none == NULL);
  kvp_cache_free(other);
  kvp_cache_free(cache);
  kvp_plan_free(half_plan);
  kvp_plan_free(full);
  kvp_plan_free(again);
}

/* A plan by name: bytes as counted here, from the format's sizes. */
static void test_names(void) {
  const kvp_shape shape = {3, 8, 4, 8};
  enum { tokens = 10 * 64, heads = 3 * 4 };
  /* Half bytes of a key and of a value of 8 channels, with a scale and a zero for the row, or for each channel of 64
     or 32 rows. */
  const struct {
    const char* name;
    size_t key, value;
  } known[] = {{"full", 32, 32},
               {"int8:0", 16 + 8, 16 + 8},
               {"int4:0", 8 + 1, 8 + 8},
               {"int2:0", 4 + 2, 4 + 8},
               {"hf4:0", 8 + 8, 8 + 8},
               {"int4:0,keys=token,hadamard=both", 8 + 8, 8 + 8},
               {"k8v4:0,sinks=0", 16 + 8, 8 + 8}};
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    kvp_plan* plan = NULL;
    size_t bytes = 0;
    CHECK(kvp_plan_from_name(known[i].name, &shape, KVP_BFLOAT16, &plan) == KVP_OK);
    CHECK(kvp_plan_memory(plan, tokens, NULL, 0, &bytes) == KVP_OK);
    const size_t rows = (size_t)tokens * heads * (known[i].key + known[i].value) / 2;
    /* At most a page of exact rows and one of first rows more for each side of a head, and the tail. */
    CHECK(bytes >= rows && bytes <= rows + (size_t)heads * 2 * (64 + 16 + 1) * 8 * 2);
    kvp_plan_free(plan);
  }
  kvp_plan* none = NULL;
  CHECK(kvp_plan_from_name("int4:hadamard=some", &shape, KVP_BFLOAT16, &none) == KVP_CONFIG_ERROR &&
        none == NULL);
  CHECK(strstr(kvp_error(), "must be one of none, keys, values, both") != NULL);
  /* A page must hold whole groups of keys: the message says what to do. */
  kvp_plan* grouped = NULL;
  CHECK(kvp_plan_from_name("int4", &shape, KVP_BFLOAT16, &grouped) == KVP_OK);
  kvp_cache_options small_pages;
  kvp_cache_options_init(&small_pages, sizeof small_pages);
  small_pages.page_rows = 32;
  kvp_cache* refused = NULL;
  CHECK(kvp_cache_new(grouped, &small_pages, &refused) == KVP_CONFIG_ERROR && refused == NULL);
  CHECK(strstr(kvp_error(), "pages of at least 64 rows") != NULL &&
        strstr(kvp_error(), "key_group=32") != NULL);
  kvp_plan_free(grouped);
  CHECK(kvp_plan_from_name("some", &shape, KVP_BFLOAT16, &none) == KVP_CONFIG_ERROR && none == NULL);
  CHECK(strstr(kvp_error(), "'some'") != NULL && strstr(kvp_error(), "int4") != NULL);
  CHECK(kvp_plan_from_name("none.json", &shape, KVP_BFLOAT16, &none) == KVP_FORMAT_ERROR && none == NULL);
  CHECK(kvp_plan_from_name("full", &shape, 7, &none) == KVP_CONFIG_ERROR && none == NULL);
  CHECK(kvp_plan_from_name(NULL, &shape, KVP_BFLOAT16, &none) == KVP_CONFIG_ERROR);
  CHECK(kvp_plan_from_name("full", NULL, KVP_BFLOAT16, &none) == KVP_CONFIG_ERROR);
  CHECK(kvp_plan_from_name("full", &shape, KVP_BFLOAT16, NULL) == KVP_CONFIG_ERROR);
  const kvp_shape empty = {0, 8, 4, 8};
  CHECK(kvp_plan_from_name("full", &empty, KVP_BFLOAT16, &none) == KVP_CONFIG_ERROR && none == NULL);
}

static void test_refusals(const kvp_plan* plan) {
  kvp_plan* none = NULL;
  CHECK(kvp_plan_from_json("{}", 2, KVP_FLOAT32, &none) == KVP_FORMAT_ERROR && none == NULL);
  CHECK(strstr(kvp_error(), "format") != NULL);
  CHECK(kvp_plan_from_json(NULL, 0, KVP_FLOAT32, &none) == KVP_CONFIG_ERROR);
  CHECK(kvp_plan_from_json(plan_text, strlen(plan_text), 7, &none) == KVP_CONFIG_ERROR);
  CHECK(kvp_cache_new(NULL, NULL, NULL) == KVP_CONFIG_ERROR);
  CHECK(kvp_cache_truncate(NULL, 0) == KVP_CONFIG_ERROR);
  kvp_cache_free(NULL);
  kvp_plan_free(NULL);

  kvp_cache* cache = NULL;
  kvp_cache_options options;
  kvp_cache_options_init(&options, sizeof options);
  options.page_rows = 17;
  CHECK(kvp_cache_new(plan, &options, &cache) == KVP_CONFIG_ERROR && cache == NULL);
  CHECK(strstr(kvp_error(), "17") != NULL);
  kvp_cache_options_init(&options, sizeof options);
  options.max_tokens = 3;
  CHECK(kvp_cache_new(plan, &options, &cache) == KVP_OK);
  CHECK(step(cache, 0, 4) == KVP_CAPACITY_ERROR);
  CHECK(info_of(cache).tokens == 0);
  const kvp_tensor q = tensor(queries, 1, q_heads);
  const kvp_tensor wrong = tensor(keys, 1, 3);
  const kvp_tensor out = tensor(outputs, 1, q_heads);
  CHECK(kvp_cache_step(cache, 0, &q, &wrong, &wrong, &out, NULL) == KVP_SHAPE_ERROR);
  CHECK(kvp_cache_step(cache, 1, &q, &wrong, &wrong, &out, NULL) == KVP_SHAPE_ERROR);
  CHECK(kvp_cache_step(cache, 0, &q, NULL, &wrong, &out, NULL) == KVP_CONFIG_ERROR);
  CHECK(strcmp(kvp_status_name(KVP_SHAPE_ERROR), "ShapeError") == 0);
  /* A caller of an earlier version knows only the first members. */
  options.size = 2 * sizeof(size_t);
  options.max_rollback = 1;
  options.page_rows = 12345;
  kvp_cache* older = NULL;
  CHECK(kvp_cache_new(plan, &options, &older) == KVP_OK);
  kvp_cache_free(older);
  struct {
    size_t size, first, behind;
  } small = {1, 2, 3};
  kvp_cache_options_init((kvp_cache_options*)&small, 2 * sizeof(size_t));
  CHECK(small.size == 2 * sizeof(size_t) && small.first == 0 && small.behind == 3);
  /* A size within a member, one that no version has, and a later version's member. */
  kvp_cache* refused = NULL;
  const size_t wrong_sizes[] = {0, 12, 123456789};
  for (size_t i = 0; i < sizeof wrong_sizes / sizeof *wrong_sizes; ++i) {
    kvp_cache_options_init(&options, sizeof options);
    options.size = wrong_sizes[i];
    CHECK(kvp_cache_new(plan, &options, &refused) == KVP_CONFIG_ERROR && refused == NULL);
  }
  struct {
    kvp_cache_options known;
    size_t unknown;
  } later;
  kvp_cache_options_init(&later.known, sizeof later);
  CHECK(later.known.size == sizeof later && later.unknown == 0 && later.known.page_rows == 64);
  CHECK(kvp_cache_new(plan, &later.known, &refused) == KVP_OK);
  kvp_cache_free(refused);
  refused = NULL;
  later.unknown = 1;
  CHECK(kvp_cache_new(plan, &later.known, &refused) == KVP_CONFIG_ERROR && refused == NULL);
  kvp_cache_options_init(&options, sizeof options);
  options.threads = 3000000000U;
  CHECK(kvp_cache_new(plan, &options, &refused) == KVP_CONFIG_ERROR && refused == NULL);
  kvp_cache_free(cache);
}

/* A layer with values of other channels than keys, one without a cache, and one that reads the first. */
static void test_layers(void) {
  const char* text =
      "{\"format\":\"kvpolicy plan\",\"version\":1,\"shape\":{\"layers\":3,\"per_layer\":[{\"q_heads\":2,"
      "\"kv_heads\":1,\"head_dim\":8,\"value_dim\":16},{},{\"q_heads\":3,\"reads\":0}]},"
      "\"settings\":[{\"policy\":\"full\"}],\"heads\":[[0],[],[]]}";
  kvp_plan* plan = NULL;
  CHECK(kvp_plan_from_json(text, strlen(text), KVP_FLOAT32, &plan) == KVP_OK);
  kvp_shape shape;
  CHECK(kvp_plan_shape(plan, &shape) == KVP_OK);
  CHECK(shape.layers == 3 && shape.kv_heads == 0 && shape.head_dim == 0);
  kvp_layer layer;
  CHECK(kvp_plan_layer(plan, 0, &layer) == KVP_OK);
  CHECK(layer.q_heads == 2 && layer.kv_heads == 1 && layer.head_dim == 8 && layer.value_dim == 16);
  CHECK(layer.window == 0 && layer.reads == 0);
  CHECK(kvp_plan_layer(plan, 2, &layer) == KVP_OK);
  CHECK(layer.q_heads == 3 && layer.kv_heads == 0 && layer.reads == 0);
  CHECK(kvp_plan_layer(plan, 3, &layer) == KVP_CONFIG_ERROR);

  kvp_cache* cache = NULL;
  CHECK(kvp_cache_new(plan, NULL, &cache) == KVP_OK);
  /* One row takes all the attention. The bias of the reading layer has its three query heads. */
  const kvp_tensor k = {keys, KVP_FLOAT32, 1, 1, 8, 0, 0};
  const kvp_tensor v = {values, KVP_FLOAT32, 1, 1, 16, 0, 0};
  const kvp_tensor q = {queries, KVP_FLOAT32, 1, 3, 8, 0, 0};
  const kvp_tensor out = {outputs, KVP_FLOAT32, 1, 3, 16, 0, 0};
  const float bias[3] = {-1e30F, -1e30F, -1e30F};
  kvp_attend_options options;
  kvp_attend_options_init(&options, sizeof options);
  options.attention_sink_bias = bias;
  CHECK(kvp_cache_append(cache, 0, &k, &v) == KVP_OK);
  CHECK(kvp_cache_attend(cache, 2, &q, &out, &options) == KVP_OK);
  for (int i = 0; i < 3 * 16; ++i) CHECK(outputs[i] == values[i % 16]);
  CHECK(kvp_cache_append(cache, 1, &k, &v) == KVP_SHAPE_ERROR);
  CHECK(strstr(kvp_error(), "layer 1 has no cache") != NULL);
  kvp_cache_free(cache);
  kvp_plan_free(plan);
}

int main(void) {
  for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) keys[i] = draw();
  for (size_t i = 0; i < sizeof values / sizeof *values; ++i) values[i] = draw();
  for (size_t i = 0; i < sizeof queries / sizeof *queries; ++i) queries[i] = draw();
  kvp_plan* plan = NULL;
  CHECK(kvp_plan_from_json(plan_text, strlen(plan_text), KVP_FLOAT32, &plan) == KVP_OK);
  if (plan != NULL) {
    test_attention(plan);
    test_halves(plan);
    test_plans(plan);
    test_refusals(plan);
  }
  test_names();
  test_reads();
  test_layers();
  kvp_plan_free(plan);
  printf("kvpolicy %s, C interface: %d failures\n", kvp_version(), failures);
  return failures == 0 ? 0 : 1;
}
