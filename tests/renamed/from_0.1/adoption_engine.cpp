// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments of the pages may use: an engine's shape, its gates and scores of heads, and one
// layer's tensors. They are members, because names of the library would hide them at namespace level.
#include <cstddef>
#include <cstdio>
#include <memory_resource>
#include <span>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
namespace block_1 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    // Every second layer attends to the latest 128 tokens, as in gpt-oss-20b.
    kvpolicy::ModelShape model{.layers = 24, .q_heads = 64, .kv_heads = 8, .head_dim = 64};
    for (std::size_t l = 0; l < model.layers; l += 2) model.change(l).window = 128;
  }
};

}  // namespace block_1
namespace block_2 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<kvpolicy::bfloat16>>;
    kvpolicy::KvCache cache{kvpolicy::uniform_plan<Full>(shape)};

    // A prompt in chunks of any size, then one token at a time: the same call.
    cache.step(layer, q, k, v, out);
  }
};

}  // namespace block_2
namespace block_3 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    const std::size_t tokens = q.tokens;
    std::vector<float> qkv(tokens * (32 + 8 + 8) * 128);  // [tokens, q heads | k heads | v heads, 128]
    const std::size_t stride = (32 + 8 + 8) * 128;
    const kvpolicy::TensorView queries{qkv.data(), tokens, 32, 128, stride, 128};
    const kvpolicy::TensorView keys{qkv.data() + 32 * 128, tokens, 8, 128, stride, 128};
    const kvpolicy::TensorView values{qkv.data() + (32 + 8) * 128, tokens, 8, 128, stride, 128};
  }
};

}  // namespace block_3
namespace block_5 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    const auto plan = kvpolicy::duo_plan<kvpolicy::bfloat16>(shape, gates, {.sparsity = 0.5});
    kvpolicy::DuoCache<kvpolicy::bfloat16> cache{plan};

    // Any mixture: every head keeps all of its rows until it is given something else.
    using Window = kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<kvpolicy::bfloat16>>;
    kvpolicy::HeadPlan<kvpolicy::bfloat16> mixed{shape};
    mixed.set(/*layer=*/3, /*KV head=*/5, Window::Config{.sinks = 4, .recent = 1024});
    mixed.limit_window(/*layer=*/1, 4096);  // a layer whose model has a sliding window itself
  }
};

}  // namespace block_5
namespace block_7 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    kvpolicy::KvCache cache{kvpolicy::duo_plan<kvpolicy::half>(shape, gates),
                            {.max_rollback = 8, .max_append = 8}};
    cache.step(layer, q, k, v, out);
    cache.truncate(cache.tokens() - 3);  // takes back the latest three, in every layer
  }
};

}  // namespace block_7
namespace block_8 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    kvpolicy::DuoCache<kvpolicy::half> cache{kvpolicy::duo_plan<kvpolicy::half>(shape, gates)};
    std::vector<float> ours(q.tokens * shape.q_heads);           // [tokens, q_heads]
    std::vector<float> theirs(ours.size());                      // your own part's log-sum-exps
    std::vector<float> their_out(ours.size() * shape.head_dim);  // and its normalised output
    cache.step(layer, q, k, v, out, {.log_sum_exp = ours});
    for (std::size_t token = 0; token < q.tokens; ++token) {
      for (std::size_t head = 0; head < shape.q_heads; ++head) {
        const std::size_t at = token * shape.q_heads + head;
        kvpolicy::merge_outputs({out.row(token, head), shape.head_dim}, ours[at],
                                {&their_out[at * shape.head_dim], shape.head_dim}, theirs[at]);
      }
    }
  }
};

}  // namespace block_8
namespace block_9 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    kvpolicy::DuoCache<kvpolicy::half> cache{kvpolicy::duo_plan<kvpolicy::half>(shape, gates)};
    std::vector<float> key(shape.head_dim);
    for (const kvpolicy::Segment& segment : cache.segments(layer, /*KV head=*/0)) {
      segment.for_each_run([&](const kvpolicy::RowRun& run) {
        for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
          kvpolicy::load_row(segment.keys, row, key);  // plain and slow: any format to float
          std::printf("position %lld\n", static_cast<long long>(segment.position_of(row)));
        }
      });
    }
  }
};

}  // namespace block_9
namespace block_16 {
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() {
    std::pmr::synchronized_pool_resource pool;  // must outlive the cache and its forks
    const auto plan = kvpolicy::duo_plan<kvpolicy::half>(shape, gates);
    const kvpolicy::CacheOptions options{.max_tokens = 131'072, .memory = &pool};
    const std::size_t needed = plan.memory(131'072, options).total();  // before anything is allocated
    kvpolicy::DuoCache<kvpolicy::half> cache{plan, options};
  }
};

}  // namespace block_16
