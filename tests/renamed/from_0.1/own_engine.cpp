// SPDX-License-Identifier: Apache-2.0
//
// An inference engine that has its own buffers, threads and attention, and uses kvpolicy for a part
// of the work. All conversations share a system prompt, whose rows are in the engine's own buffers
// and are attended by the engine; what a conversation adds is a kvpolicy cache. The two partial
// results are merged by their log-sum-exps, and the result is checked against attention over all
// rows.
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/cpu.hpp>
#include <kvpolicy/duo.hpp>

namespace {

using kvpolicy::TensorView;

constexpr kvpolicy::ModelShape shape{.layers = 2, .q_heads = 8, .kv_heads = 4, .head_dim = 64};
constexpr std::size_t sinks = 8, recent = 32;

// ---- the engine's threads, which wait for loops

class Workers {
 public:
  explicit Workers(std::size_t count) {
    for (std::size_t i = 0; i + 1 < count; ++i) {
      threads_.emplace_back([this] {
        for (std::size_t seen = 0;;) {
          {
            std::unique_lock lock{mutex_};
            begun_.wait(lock, [&] { return stop_ || loop_ != seen; });
            if (stop_) return;
            seen = loop_;
          }
          work();
        }
      });
    }
  }
  ~Workers() {
    {
      const std::lock_guard lock{mutex_};
      stop_ = true;
    }
    begun_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  [[nodiscard]] std::size_t count() const { return threads_.size() + 1; }

  // Calls body(i) once for each i below `calls`; the calling thread works as well.
  void run(std::size_t calls, const std::function<void(std::size_t)>& body) {
    {
      const std::lock_guard lock{mutex_};
      body_ = &body;
      next_ = 0;
      calls_ = left_ = calls;
      ++loop_;
    }
    begun_.notify_all();
    work();
    std::unique_lock lock{mutex_};
    ended_.wait(lock, [&] { return left_ == 0; });
  }

 private:
  void work() {
    std::unique_lock lock{mutex_};
    while (next_ < calls_) {
      const std::size_t index = next_++;
      const auto& body = *body_;
      lock.unlock();
      body(index);
      lock.lock();
      if (--left_ == 0) ended_.notify_all();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable begun_, ended_;
  const std::function<void(std::size_t)>* body_ = nullptr;
  std::size_t next_ = 0, calls_ = 0, left_ = 0, loop_ = 0;
  bool stop_ = false;
};

// The interface through which kvpolicy runs loops (kvpolicy::cpu::ParallelFor); it can be copied.
struct EngineFor {
  std::shared_ptr<Workers> workers;
  [[nodiscard]] std::size_t threads() const { return workers->count(); }
  void operator()(std::size_t calls, const std::function<void(std::size_t)>& body) const {
    workers->run(calls, body);
  }
};
static_assert(kvpolicy::cpu::ParallelFor<EngineFor>);

using Attention = kvpolicy::cpu::Engine<EngineFor>;
using Conversation = kvpolicy::cpu::KvCache<float, Attention>;

// ---- the engine's buffers

// Rows in the order of a fused projection: for each token all queries, then all keys, then all
// values.
struct FusedRows {
  static constexpr std::size_t heads = shape.q_heads + 2 * shape.kv_heads;
  static constexpr std::size_t token_stride = heads * shape.head_dim;
  std::vector<float> numbers;
  std::size_t tokens = 0;

  [[nodiscard]] TensorView<const float> part(std::size_t first_head, std::size_t count) const {
    return {numbers.data() + first_head * shape.head_dim,
            tokens,
            count,
            shape.head_dim,
            token_stride,
            shape.head_dim};
  }
  [[nodiscard]] TensorView<const float> q() const { return part(0, shape.q_heads); }
  [[nodiscard]] TensorView<const float> k() const { return part(shape.q_heads, shape.kv_heads); }
  [[nodiscard]] TensorView<const float> v() const {
    return part(shape.q_heads + shape.kv_heads, shape.kv_heads);
  }
};

// Outputs are stored heads first: [q_heads, tokens, head_dim].
struct Outputs {
  explicit Outputs(std::size_t count)
      : tokens{count}, numbers(shape.q_heads * count * shape.head_dim), log_sum_exp(count * shape.q_heads) {}
  [[nodiscard]] TensorView<float> view() {
    return {numbers.data(), tokens, shape.q_heads, shape.head_dim, shape.head_dim, tokens * shape.head_dim};
  }
  [[nodiscard]] std::span<float> row(std::size_t token, std::size_t head) {
    return {view().row(token, head), shape.head_dim};
  }

  std::size_t tokens;
  std::vector<float> numbers;
  std::vector<float> log_sum_exp;  // [tokens, q_heads]
};

// ---- the engine's attention: over the shared prompt, all of which every query sees

void attend_shared(const FusedRows& prompt, const FusedRows& asking, Workers& workers, Outputs& out) {
  workers.run(asking.tokens * shape.q_heads, [&](std::size_t index) {
    const std::size_t token = index / shape.q_heads;
    const std::size_t head = index % shape.q_heads;
    const float* query = asking.q().row(token, head);
    const auto values = out.row(token, head);
    kvpolicy::SoftmaxState state;
    for (std::size_t row = 0; row < prompt.tokens; ++row) {
      const float* key = prompt.k().row(row, head / shape.queries_per_kv());
      float logit = 0.0F;
      for (std::size_t i = 0; i < shape.head_dim; ++i) logit += query[i] * key[i];
      logit /= std::sqrt(static_cast<float>(shape.head_dim));
      kvpolicy::accumulate(state, values, logit,
                           {prompt.v().row(row, head / shape.queries_per_kv()), shape.head_dim});
    }
    kvpolicy::normalize(state, values);
    out.log_sum_exp[index] = state.log_sum_exp();
  });
}

// ---- a layer of a step

// The cache counts a conversation's positions from 0. Keys and queries are already rotated to their
// positions after the shared prompt, so the distances between them are those of the model.
Outputs run_layer(Conversation& cache, std::size_t layer, const FusedRows& prompt, const FusedRows& rows,
                  Workers& workers) {
  Outputs out{rows.tokens};
  kvpolicy::AttendOptions options;
  options.log_sum_exp = out.log_sum_exp;
  if (rows.tokens <= cache.options().max_append) {
    cache.append(layer, rows.k(), rows.v());
    // Here an engine may do work that needs the new rows in the cache but not their attention.
    cache.attend(layer, rows.q(), out.view(), options);
  } else {
    cache.step(layer, rows.q(), rows.k(), rows.v(), out.view(), options);
  }

  Outputs shared{rows.tokens};
  attend_shared(prompt, rows, workers, shared);
  for (std::size_t token = 0; token < rows.tokens; ++token) {
    for (std::size_t head = 0; head < shape.q_heads; ++head) {
      const std::size_t index = token * shape.q_heads + head;
      out.log_sum_exp[index] = kvpolicy::merge_outputs(out.row(token, head), out.log_sum_exp[index],
                                                       shared.row(token, head), shared.log_sum_exp[index]);
    }
  }
  return out;
}

// ---- the expected result, in double, row by row

struct Text {
  std::vector<const float*> keys, values;  // of one KV head
};

double worst_error(const Text& prompt, const Text& said, std::size_t position, bool streaming,
                   const float* query, std::span<const float> out, float log_sum_exp) {
  std::vector<double> sum(shape.head_dim, 0.0);
  double total = 0.0;
  const auto add = [&](const float* key, const float* value) {
    double logit = 0.0;
    for (std::size_t i = 0; i < shape.head_dim; ++i) logit += double{query[i]} * double{key[i]};
    const double weight = std::exp(logit / std::sqrt(static_cast<double>(shape.head_dim)));
    total += weight;
    for (std::size_t i = 0; i < shape.head_dim; ++i) sum[i] += weight * double{value[i]};
  };
  for (std::size_t row = 0; row < prompt.keys.size(); ++row) add(prompt.keys[row], prompt.values[row]);
  for (std::size_t row = 0; row <= position; ++row) {
    if (streaming && row >= sinks && row + recent <= position) continue;
    add(said.keys[row], said.values[row]);
  }
  double worst = std::abs(std::log(total) - double{log_sum_exp});
  for (std::size_t i = 0; i < shape.head_dim; ++i) {
    worst = std::fmax(worst, std::abs(sum[i] / total - double{out[i]}));
  }
  return worst;
}

}  // namespace

int main() {
  const kvpolicy::HeadGates gates{2, 4, {0.9, 0.1, 0.8, 0.0, 0.2, 1.0, 0.3, 0.7}};
  const auto plan = kvpolicy::duo_plan(shape, gates, {.sinks = sinks, .recent = recent});
  const auto workers = std::make_shared<Workers>(3);
  Conversation cache{plan, {.max_append = 4}, Attention{EngineFor{workers}}};

  std::mt19937 random{1};
  std::normal_distribution<float> normal;
  const auto project = [&](std::size_t tokens) {
    FusedRows rows{std::vector<float>(tokens * FusedRows::token_stride), tokens};
    for (float& number : rows.numbers) number = normal(random);
    return rows;
  };
  std::vector<FusedRows> prompt;  // for each layer; the engine keeps it for all conversations
  for (std::size_t layer = 0; layer < shape.layers; ++layer) prompt.push_back(project(96));
  std::vector<std::vector<FusedRows>> said(shape.layers);  // only for the check

  double worst = 0.0;
  for (const std::size_t tokens : {150, 3, 1, 1, 40, 1, 4, 1}) {
    const std::size_t first = cache.tokens();
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      said[layer].push_back(project(tokens));
      const FusedRows& rows = said[layer].back();
      Outputs out = run_layer(cache, layer, prompt[layer], rows, *workers);
      for (std::size_t head = 0; head < shape.q_heads; ++head) {
        const std::size_t kv_head = head / shape.queries_per_kv();
        const auto list = [&](Text& text, const FusedRows& part) {
          for (std::size_t row = 0; row < part.tokens; ++row) {
            text.keys.push_back(part.k().row(row, kv_head));
            text.values.push_back(part.v().row(row, kv_head));
          }
        };
        Text shared, own;
        list(shared, prompt[layer]);
        for (const FusedRows& part : said[layer]) list(own, part);
        const bool streaming =
            plan.has<kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<float>>>(layer, kv_head);
        for (std::size_t token = 0; token < tokens; ++token) {
          worst = std::fmax(worst,
                            worst_error(shared, own, first + token, streaming, rows.q().row(token, head),
                                        out.row(token, head), out.log_sum_exp[token * shape.q_heads + head]));
        }
      }
    }
  }
  std::printf(
      "%zu tokens after a shared prompt of %zu, on %zu threads: %zu bytes of keys and "
      "values; merged attention is off by %.1e\n",
      cache.tokens(), prompt[0].tokens, workers->count(), cache.bytes(), worst);
  return worst <= 1e-4 ? 0 : 1;
}
