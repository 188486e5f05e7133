/* SPDX-License-Identifier: Apache-2.0
 *
 * Times llama2.c's decode step after a text of many tokens, in the program as it is or edited (-DADOPTED). RUN_C is the
 * program's file, included without its main. The rows of the text are random numbers, the same in both programs and
 * small, so that all of them get some attention: reading such a text would take minutes, and only the time after it counts.
 *
 * usage: time_decode CHECKPOINT ROWS TOKENS [PLAN BITS]
 * Prints a JSON object: milliseconds of each token, the likeliest token after each, bytes of the cache. */
#include <stdint.h>

#define TESTING
#include RUN_C

/* A number from -0.05 to 0.05 that depends on its address alone. */
static float number(uint64_t layer, uint64_t side, uint64_t row, uint64_t channel) {
    uint64_t x = ((layer * 2 + side) << 40) + (row << 16) + channel + 1;
    x *= 0x9E3779B97F4A7C15u; x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u; x ^= x >> 32;
    return 0.1f * ((float)(x >> 40) / 16777216.0f - 0.5f);
}

static void fill(float* out, int layer, int side, int row, int kv_dim) {
    for (int i = 0; i < kv_dim; i++) { out[i] = number(layer, side, row, i); }
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

int main(int argc, char* argv[]) {
    if (argc != 4 && argc != 6) { fprintf(stderr, "usage: time_decode CHECKPOINT ROWS TOKENS [PLAN BITS]\n"); return 1; }
    const int rows = atoi(argv[2]), tokens = atoi(argv[3]), warm = 2;
#ifdef ADOPTED
    if (argc == 6) { kv_name = argv[4]; kv_dtype = atoi(argv[5]) == 32 ? KVP_FLOAT32 : KVP_BFLOAT16; }
#endif
    Transformer transformer;
    build_transformer(&transformer, argv[1]);
    Config* p = &transformer.config;
    RunState* s = &transformer.state;
    const int head_size = p->dim / p->n_heads, kv_dim = head_size * p->n_kv_heads;
    /* The program holds rows for seq_len tokens; more would be written past their end. */
    if (rows < 0 || tokens < 1 || rows + warm + tokens > p->seq_len) {
        fprintf(stderr, "%d rows and %d tokens: the model has room for %d, %d of them to warm up\n", rows, tokens, p->seq_len, warm);
        return 1;
    }
    size_t cache_bytes = (size_t)2 * p->n_layers * (rows + warm + tokens) * kv_dim * sizeof(float);
    for (int l = 0; l < p->n_layers; l++) {
        for (int row = 0; row < rows; row++) {
#ifdef ADOPTED
            if (s->kv) {
                kvp_tensor k = {s->key_cache, KVP_FLOAT32, 1, p->n_kv_heads, head_size};
                kvp_tensor v = {s->value_cache, KVP_FLOAT32, 1, p->n_kv_heads, head_size};
                fill(s->key_cache, l, 0, row, kv_dim);
                fill(s->value_cache, l, 1, row, kv_dim);
                kv_check(kvp_cache_append(s->kv, l, &k, &v));
                continue;
            }
#endif
            const size_t at = ((size_t)l * p->seq_len + row) * kv_dim;
            fill(s->key_cache + at, l, 0, row, kv_dim);
            fill(s->value_cache + at, l, 1, row, kv_dim);
        }
    }
    printf("{\"ms\":[");
    int* likeliest = calloc(tokens, sizeof(int));
    for (int i = -warm; i < tokens; i++) {
        const double start = now_ms();
        float* logits = forward(&transformer, 300 + i, rows + warm + i);
        if (i < 0) { continue; }
        printf("%s%.4f", i == 0 ? "" : ",", now_ms() - start);
        likeliest[i] = sample_argmax(logits, p->vocab_size);
    }
    printf("],\"likeliest\":[");
    for (int i = 0; i < tokens; i++) { printf("%s%d", i == 0 ? "" : ",", likeliest[i]); }
#ifdef ADOPTED
    kvp_cache_info info = {sizeof info};
    if (s->kv) { kv_check(kvp_cache_get_info(s->kv, &info)); cache_bytes = info.bytes; }
#endif
    printf("],\"cache_bytes\":%zu,\"layers\":%d,\"q_heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"seq_len\":%d}\n",
           cache_bytes, p->n_layers, p->n_heads, p->n_kv_heads, head_size, p->seq_len);
    free(likeliest);
    free_transformer(&transformer);
    return 0;
}
