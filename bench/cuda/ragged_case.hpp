// SPDX-License-Identifier: Apache-2.0
//
// Times whole steps of many sequences under several plans: together, by gpu::SeatedBatch in a graph
// or by gpu::Batch, and one sequence after another by gpu::KvCache::step, which is what the batches
// are compared with. Every timed step appends, so bytes are counted for each and their mean is taken.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decode_case.hpp"
#include "ragged_plans.hpp"

namespace kvpolicy::bench {

/// How the sequences take their steps.
enum class Together {
  seated,      ///< SeatedBatch, captured
  batch,       ///< Batch
  one_by_one,  ///< each by itself, all in one graph
  one_by_one_eager
};

struct RaggedCase {
  std::string name;
  std::string baseline;  ///< the same one by one; empty: none
  std::string per_byte;  ///< the case to compare the rate with; empty: none
  std::vector<RaggedSequence> sequences;
  Together together = Together::seated;
};

/// Filled caches that share an engine, and their next tokens.
class RaggedRig {
 public:
  RaggedRig(const RaggedCase& what, Run& run)
      : what_{what},
        run_{run},
        shape_{what.sequences.at(0).plan.shape()},
        engine_{std::make_shared<Engine>(shape_, gpu::default_memory(), run.stream)},
        indptr_{places_of(what.sequences)},
        queries_{tokens() * shape_.q_heads * shape_.head_dim, run.stream},
        keys_{tokens() * shape_.kv_heads * shape_.head_dim, run.stream},
        values_{keys_.count(), run.stream},
        out_{queries_.count(), run.stream} {
    queries_.randomize(1U << 20, run.stream);
    keys_.randomize((1U << 20) + 1, run.stream);
    values_.randomize((1U << 20) + 2, run.stream);
    fill();
    if (what.together == Together::seated) {
      seated_.emplace(engine_, caches_.size(), 1, caches_[0].options().page_rows, gpu::default_memory(),
                      run.stream);
      for (std::size_t i = 0; i < caches_.size(); ++i) seated_->seat(i, caches_[i], Read::all, run.stream);
    }
    if (what.together == Together::batch) {
      batch_.emplace(engine_, caches_.size(), gpu::default_memory(), run.stream);
      for (Cache& cache : caches_) members_.push_back({&cache, {}});
    }
  }

  /// Checks a first step: of every sequence against the step of a fork of its cache, and of one sequence of
  /// each plan against double precision. Returns the error, if any.
  [[nodiscard]] std::optional<std::string> verify() {
    const Tensor16 own{out_.count(), run_.stream};
    own.poison(run_.stream);
    out_.poison(run_.stream);
    std::vector<Probe> probes;
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      Cache twin = caches_[i].fork(run_.stream);
      step_alone(twin, i, own);
      if (!is_first_of_its_plan(i)) continue;
      for (const std::size_t head : checked_heads(what_.sequences[i].plan, 0)) {
        probes.push_back({i, head, caches_[i].rows(0, head, Read::all, 0, run_.stream)});
      }
    }
    put_step();
    after_step();
    const Checked checked{.q = download(queries_.data(), queries_.count(), run_.stream),
                          .k = download(keys_.data(), keys_.count(), run_.stream),
                          .v = download(values_.data(), values_.count(), run_.stream),
                          .out = download(out_.data(), out_.count(), run_.stream)};
    if (auto wrong = compare(checked.out, download(own.data(), own.count(), run_.stream))) return wrong;
    for (Probe& probe : probes) {
      if (auto wrong = check(probe, checked)) return wrong;
    }
    return std::nullopt;
  }
  /// The largest relative error that `verify` found in double precision, and against a cache's own step.
  [[nodiscard]] double error() const { return error_; }
  [[nodiscard]] double own_error() const { return own_error_; }

  /// One step of all sequences.
  double seconds() {
    const double seconds = run_.timer->seconds([&] {
      const auto begin = std::chrono::steady_clock::now();
      put_step();
      host_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    });
    after_step();
    return seconds;
  }
  /// What the host needed to put the latest step on the stream.
  [[nodiscard]] double host_seconds() const { return host_seconds_; }
  /// What the latest step had to read.
  [[nodiscard]] double bytes() const {
    double bytes = 0.0;
    for (const RaggedSequence& one : what_.sequences) bytes += bytes_in_step(one, steps_ - 1);
    return bytes;
  }

 private:
  // A head's rows before the first step.
  struct Probe {
    std::size_t sequence;
    std::size_t head;
    gpu::CachedRows rows;
  };
  // The first step's tensors.
  struct Checked {
    std::vector<bfloat16> q;
    std::vector<bfloat16> k;
    std::vector<bfloat16> v;
    std::vector<bfloat16> out;
  };
  using Rows = TensorView<const bfloat16>;

  [[nodiscard]] static std::vector<std::int32_t> places_of(const std::vector<RaggedSequence>& sequences) {
    std::vector<std::int32_t> indptr{0};
    for (const RaggedSequence& one : sequences) {
      indptr.push_back(indptr.back() + static_cast<std::int32_t>(one.queries));
    }
    return indptr;
  }
  [[nodiscard]] std::size_t first_token(std::size_t sequence) const {
    return static_cast<std::size_t>(indptr_[sequence]);
  }
  [[nodiscard]] std::size_t tokens() const { return first_token(indptr_.size() - 1); }
  [[nodiscard]] bool is_first_of_its_plan(std::size_t sequence) const {
    const auto same = [&](const RaggedSequence& one) {
      const RaggedSequence& wanted = what_.sequences[sequence];
      return one.queries == wanted.queries && rules_of(one.plan) == rules_of(wanted.plan);
    };
    return std::ranges::find_if(what_.sequences, same) - what_.sequences.begin() ==
           static_cast<std::ptrdiff_t>(sequence);
  }

  // Rows waiting in the ring that `append` needs take memory in every cache, so portions are small.
  static constexpr std::size_t most_portion = 1024;

  void fill() {
    std::size_t longest = 0;
    for (const RaggedSequence& one : what_.sequences) longest = std::max(longest, one.prompt());
    const std::size_t portion = std::min(most_portion, longest);
    Filler filler{shape_, portion, run_.stream};
    for (const RaggedSequence& one : what_.sequences) {
      Cache& cache = caches_.emplace_back(
          one.plan,
          gpu::CacheOptions{.max_rollback = one.is_prompt() ? one.queries : 0, .max_append = portion},
          run_.stream, engine_);
      cache.reserve(one.tokens + run_.samples + spare_steps, run_.stream);
      const std::size_t votes = voting_queries(one.plan);
      filler.fill(cache, 0, one.prompt() - votes);
      if (votes > 0) vote(cache, votes);
      cache.commit(run_.stream);
      if (votes > 0) cache.compress(run_.stream);
    }
  }
  [[nodiscard]] static std::size_t voting_queries(const Plan& plan) {
    std::size_t most = 0;
    for (const HeadRule& rule : rules_of(plan)) most = std::max(most, rule.observation_window);
    return most;
  }
  // Rows that come with the queries by which the others are ranked.
  void vote(Cache& cache, std::size_t queries) const {
    const std::size_t row = shape_.head_dim;
    const Tensor16 q{queries * shape_.q_heads * row, run_.stream};
    const Tensor16 k{queries * shape_.kv_heads * row, run_.stream};
    const Tensor16 out{q.count(), run_.stream};
    q.randomize(1U << 21, run_.stream);
    k.randomize((1U << 21) + 1, run_.stream);
    cache.step(0, Rows{q.view(shape_.q_heads, row)}, Rows{k.view(shape_.kv_heads, row)},
               Rows{k.view(shape_.kv_heads, row)}, out.view(shape_.q_heads, row), {}, run_.stream);
  }

  // ---- steps

  [[nodiscard]] TensorView<bfloat16> all_of(const Tensor16& tensor, std::size_t heads) const {
    return tensor.view(heads, shape_.head_dim);
  }
  [[nodiscard]] TensorView<bfloat16> part_of(const Tensor16& tensor, std::size_t heads,
                                             std::size_t sequence) const {
    return all_of(tensor, heads).slice(first_token(sequence), what_.sequences[sequence].queries);
  }
  void step_alone(Cache& cache, std::size_t sequence, const Tensor16& out) const {
    cache.step(0, Rows{part_of(queries_, shape_.q_heads, sequence)},
               Rows{part_of(keys_, shape_.kv_heads, sequence)},
               Rows{part_of(values_, shape_.kv_heads, sequence)}, part_of(out, shape_.q_heads, sequence), {},
               run_.stream);
  }
  void step_each() {
    for (std::size_t i = 0; i < caches_.size(); ++i) step_alone(caches_[i], i, out_);
  }
  void put_step() {
    const Rows q{all_of(queries_, shape_.q_heads)};
    const Rows k{all_of(keys_, shape_.kv_heads)};
    const Rows v{all_of(values_, shape_.kv_heads)};
    const TensorView<bfloat16> out = all_of(out_, shape_.q_heads);
    switch (what_.together) {
      case Together::seated:
        if (!graph_) {
          graph_ = reference::Graph{run_.stream, [&] { seated_->step(0, q, k, v, out, {}, run_.stream); }};
        }
        seated_->replayed();
        return graph_.launch(run_.stream);
      case Together::batch:
        require(batch_->step(0, members_, indptr_, q, k, v, out, run_.stream).empty(), what_.name,
                ": a sequence was left out, but its memory had been reserved");
        return;
      case Together::one_by_one:
        if (!graph_) graph_ = reference::Graph{run_.stream, [&] { step_each(); }};
        for (Cache& cache : caches_) cache.replayed();
        return graph_.launch(run_.stream);
      case Together::one_by_one_eager: return step_each();
    }
  }
  void after_step() {
    ++steps_;
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      if (what_.sequences[i].is_prompt()) caches_[i].truncate(what_.sequences[i].prompt(), run_.stream);
    }
  }

  // ---- checks

  [[nodiscard]] double most_error(std::size_t sequence) const {
    const bool packs = std::ranges::any_of(rules_of(what_.sequences[sequence].plan), &HeadRule::is_quantized);
    return packs ? most_error_packed : most_error_exact;
  }
  // Every query head of every token with what the cache's own step gives.
  [[nodiscard]] std::optional<std::string> compare(const std::vector<bfloat16>& out,
                                                   const std::vector<bfloat16>& own) {
    const std::size_t dim = shape_.head_dim;
    std::vector<double> expected(dim);
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      const double most = most_error(i);
      for (std::size_t at = first_token(i) * shape_.q_heads; at < first_token(i + 1) * shape_.q_heads; ++at) {
        const auto row = std::span{own}.subspan(at * dim, dim);
        std::ranges::transform(row, expected.begin(),
                               [](bfloat16 number) { return static_cast<float>(number); });
        const double error = relative_error(std::span{out}.subspan(at * dim, dim), expected);
        if (!(error <= most)) {
          return message(what_.name, ": query head ", at % shape_.q_heads, " of sequence ", i,
                         " differs from the cache's own step by ", error, ", allowed are ", most);
        }
        own_error_ = std::max(own_error_, error);
      }
    }
    return std::nullopt;
  }
  // A head's first and last query in double precision; and the rows are those that are counted.
  [[nodiscard]] std::optional<std::string> check(Probe& probe, const Checked& checked) {
    const RaggedSequence& one = what_.sequences[probe.sequence];
    const std::size_t dim = shape_.head_dim;
    const std::size_t row = shape_.kv_heads * dim;
    const HeadRule rule = gpu::served_rule(one.plan, 0, probe.head);
    const auto packed = static_cast<std::size_t>(std::ranges::count(probe.rows.quantized, true));
    const auto own = [&](const std::vector<bfloat16>& numbers) {
      return std::span{numbers}.subspan(first_token(probe.sequence) * row, one.queries * row);
    };
    add_rows(probe.rows, own(checked.k), own(checked.v), shape_.kv_heads, probe.head, dim, one.queries,
             one.prompt());
    const HeadReads reads = reads_after_prompt(rule, one.tokens, one.prompt());
    if (probe.rows.positions.size() != reads.exact_rows + reads.packed_rows || packed != reads.packed_rows) {
      return message(what_.name, ": KV head ", probe.head, " of sequence ", probe.sequence, " reads ",
                     probe.rows.positions.size(), " rows, ", packed, " of them quantised; counted were ",
                     reads.exact_rows + reads.packed_rows, " and ", reads.packed_rows);
    }
    for (const std::size_t token : {std::size_t{0}, one.queries - 1}) {
      const std::size_t member = token % shape_.queries_per_kv();
      const std::size_t at = ((first_token(probe.sequence) + token) * shape_.q_heads +
                              probe.head * shape_.queries_per_kv() + member) *
                             dim;
      const Sight sight{.position = static_cast<std::int64_t>(one.prompt() + token)};
      const double error =
          relative_error(std::span{checked.out}.subspan(at, dim),
                         attention(std::span{checked.q}.subspan(at, dim), probe.rows, sight));
      if (!(error <= most_error(probe.sequence))) {
        return message(what_.name, ": KV head ", probe.head, " of sequence ", probe.sequence, " is off by ",
                       error, ", allowed are ", most_error(probe.sequence));
      }
      error_ = std::max(error_, error);
    }
    return std::nullopt;
  }

  static constexpr std::size_t spare_steps = 8;  // the first one and those before times count

  const RaggedCase& what_;
  Run& run_;
  ModelShape shape_;
  std::shared_ptr<Engine> engine_;
  std::vector<std::int32_t> indptr_;
  Tensor16 queries_;  // [tokens of a step, q_heads, head_dim]
  Tensor16 keys_;
  Tensor16 values_;
  Tensor16 out_;
  std::deque<Cache> caches_;  // batches keep their addresses
  std::optional<gpu::SeatedBatch<bfloat16>> seated_;
  std::optional<gpu::Batch<bfloat16>> batch_;
  std::vector<gpu::Batch<bfloat16>::Sequence> members_;
  reference::Graph graph_;
  std::size_t steps_ = 0;
  double error_ = 0.0;
  double own_error_ = 0.0;
  double host_seconds_ = 0.0;
};

inline void run_ragged(benchmark::State& state, Run& run, const RaggedCase& what) {
  guarded(state, run, what.name, [&] {
    RaggedRig rig{what, run};
    if (const auto wrong = rig.verify()) return refuse(state, run, *wrong);
    for (int i = 0; i < 3; ++i) rig.seconds();
    double bytes = 0.0;
    Samples host;
    const Samples samples = sample(state, [&] {
      const double seconds = rig.seconds();
      bytes += rig.bytes();
      host.add(rig.host_seconds());
      return seconds;
    });
    bytes /= static_cast<double>(samples.count());
    report_times(state, run, what.name, samples, 1.0);
    const double seconds = run.seconds[what.name];
    report_bytes(state, run, seconds, bytes);
    double flops = 0.0;
    for (const RaggedSequence& one : what.sequences) flops += prompt_flops(one);
    if (flops > 0.0) {
      state.counters["flops"] = flops;
      // Parts of prompts are a launch of their own, which does not begin before the other has ended.
      if (run.device.flops_per_second > 0) {
        state.counters["limit_us"] =
            (bytes / run.device.bytes_per_second + flops / run.device.flops_per_second) * 1e6;
      }
    }
    run.rates[what.name] = bytes / seconds;
    if (const auto other = run.rates.find(what.per_byte); other != run.rates.end()) {
      state.counters["per_byte"] = run.rates[what.name] / other->second;
    }
    report_ratio(state, run, what.baseline, seconds);
    state.counters["sequences"] = static_cast<double>(what.sequences.size());
    state.counters["host_us"] = host.median() * 1e6;
    state.counters["error"] = rig.error();
    state.counters["own_error"] = rig.own_error();
  });
}

}  // namespace kvpolicy::bench
