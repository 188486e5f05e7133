// SPDX-License-Identifier: Apache-2.0
//
// Kernels that are compiled from a scorer or a chunk summary, which may be the caller's own: a function of the
// key that ranks rows, a summary that treats each channel by itself. Heads name them in their rules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/cuda/dispatch.hpp>
#include <kvpolicy/cuda/kernels/key_scores.cuh>
#include <kvpolicy/cuda/kernels/own_summary.cuh>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/policy/chunk_summary.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy::gpu {

/// How many blocks such a kernel has: `blocks` for each of `heads` heads.
struct OwnLaunch {
  int blocks = 1;
  int heads = 1;
  cudaStream_t stream = nullptr;
};

/// The kernels of one engine. Not synchronised.
template <Element E>
class OwnKernels {
 public:
  explicit OwnKernels(std::size_t head_dim) : head_dim_{head_dim} {}

  /// Compiles the kernel of a key scorer. A second scorer of the same name takes the first one's place.
  template <GatheringKeyScorer S>
  void add() {
    dispatch_head_dim(head_dim_, [&]<int D>() {
      add(S::name, {key_scores_kernel<E, D, typename S::Gather>, "key_scores_kernel", key_scores_threads});
    });
  }
  /// The same with a kernel that was compiled before. @throws DeviceError
  void add(std::string_view scorer, const Kernel<KeyScoresParams>& kernel) {
    load_kernel(kernel);
    put(key_scorers_, {scorer, kernel});
  }
  /// The same of a summary.
  template <class S>
    requires SummaryChannel<typename S::Channel>
  void add() {
    static_assert(S::vectors <= 2, "gpu::Engine::serve: kernels score chunks by one or two vectors");
    using Channel = typename S::Channel;
    dispatch_head_dim(head_dim_, [&]<int D>() {
      const SummaryKernels own{
          S::name,
          {own_summary_kernel<E, D, Channel>, "own_summary_kernel", write_threads},
          {own_score_kernel<E, D, Channel>, "own_score_kernel", score_threads, score_shared_bytes<D>()}};
      load_kernel(own.close);
      load_kernel(own.score);
      put(summaries_, own);
    });
  }

  /// Refuses a head whose scorer or summary has no kernel here. @throws ConfigError
  void check_has(const HeadRule& rule) const {
    if (rule.ranking == Ranking::keys) static_cast<void>(number_of(rule.scorer));
    if (has_own_summary(rule)) static_cast<void>(summary(rule.summary));
  }
  /// The number of a key scorer (CompressionSettings::scorer). @throws ConfigError if it has no kernel
  [[nodiscard]] int number_of(std::string_view scorer) const {
    const auto found = std::ranges::find(key_scorers_, scorer, &ScorerKernel::name);
    require(
        found != key_scorers_.end(), "cuda: rows are ranked by a function of their keys, ", scorer,
        ", for which the engine has no kernel; call Engine::serve with the scorer before the cache is made, "
        "or run the plan on the host");
    return static_cast<int>(found - key_scorers_.begin());
  }

  /// Scores rows of the heads whose scorer `params` names. @throws DeviceError
  void score_keys(const KeyScoresParams& params, const OwnLaunch& how) const {
    launch(key_scorers_[static_cast<std::size_t>(params.scorer)].score, {.x = how.blocks, .y = how.heads},
           how.stream, params);
  }
  /// Summarises the chunks that `call` closes, in heads with this summary. @throws ConfigError, DeviceError
  void close_chunks(std::string_view name, const AppendParams& call, const OwnLaunch& how) const {
    launch(summary(name).close, {.x = how.blocks, .y = how.heads}, how.stream,
           {.call = call, .summary = summary_tag(name)});
  }
  /// Scores chunks of heads with this summary. @throws ConfigError, DeviceError
  void score_chunks(std::string_view name, const ScoreParams& scored, const OwnLaunch& how) const {
    launch(summary(name).score, {.x = how.blocks, .y = how.heads}, how.stream,
           {.scored = scored, .summary = summary_tag(name)});
  }

 private:
  struct ScorerKernel {
    std::string_view name;
    Kernel<KeyScoresParams> score;
  };
  struct SummaryKernels {
    std::string_view name;
    Kernel<OwnSummaryParams> close;
    Kernel<OwnScoreParams> score;
  };

  template <class Named>
  static void put(std::vector<Named>& kernels, const Named& own) {
    const auto found = std::ranges::find(kernels, own.name, &Named::name);
    if (found != kernels.end()) {
      *found = own;
    } else {
      kernels.push_back(own);
    }
  }
  [[nodiscard]] const SummaryKernels& summary(std::string_view name) const {
    const auto found = std::ranges::find(summaries_, name, &SummaryKernels::name);
    require(
        found != summaries_.end(), "cuda: chunks are summarised by ", name,
        ", for which the engine has no "
        "kernels; call Engine::serve with the summary before the cache is made, or run the plan on the host");
    return *found;
  }

  std::size_t head_dim_;
  std::vector<ScorerKernel> key_scorers_;
  std::vector<SummaryKernels> summaries_;
};

}  // namespace kvpolicy::gpu
