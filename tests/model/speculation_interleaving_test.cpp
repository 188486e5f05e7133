// SPDX-License-Identifier: Apache-2.0
//
// A text in long use: verifications that accept all, some or none of their draft tokens, as chains and as
// trees, abandoned steps, new selections, rollbacks, forks and further prompts, in random order. After each
// operation the decoder's cache is compared with one that read the same text token by token: it must have the
// same bytes, and for the next token the same logits to the last bit (row_by_row.hpp).
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shipped_policies.hpp>

#include "model/guessing.hpp"

namespace kvpolicy::reference::speculation_interleaving_test {
namespace {

constexpr std::size_t prompt_chunk = 30;

// A tree of random tokens that never stops proposing; most tokens are refused.
class RandomTree {
 public:
  explicit RandomTree(std::size_t vocabulary) : vocabulary_{vocabulary} {}
  [[nodiscard]] std::size_t vocabulary() const { return vocabulary_; }
  void propose(std::span<const int>, std::size_t most, const SamplingOptions&, Random& random,
               DraftTokens& guesses) const {
    guesses.clear();
    const auto below = [&](std::size_t n) {
      return static_cast<std::size_t>(random.uniform() * static_cast<double>(n));
    };
    for (std::size_t i = 0; i < most; ++i) {
      const std::size_t parent = below(i + 1);
      const int token = static_cast<int>(below(vocabulary_));
      guesses.push_back({token, Distribution::certain(token), parent == i ? TokenTree::text : parent});
    }
  }

 private:
  std::size_t vocabulary_;
};

// Uses another draft for each call: all of them must follow a text that the others have extended.
class Changing {
 public:
  explicit Changing(std::vector<AnyDraft> drafts) : drafts_{std::move(drafts)} {}
  [[nodiscard]] std::size_t vocabulary() const { return drafts_.front().vocabulary(); }
  void propose(std::span<const int> text, std::size_t most, const SamplingOptions& sampling, Random& random,
               DraftTokens& guesses) {
    const auto which = static_cast<std::size_t>(random.uniform() * static_cast<double>(drafts_.size()));
    drafts_[which].propose(text, most, sampling, random, guesses);
  }

 private:
  std::vector<AnyDraft> drafts_;
};

// A decoder, and a cache that reads its text token by token.
template <class Plan>
class Play {
 public:
  using Cache = KvCache<float>;
  using Decoder = SpeculativeDecoder<RowByRow, Cache, Changing>;

  Play(const Llama& model, const Llama& near, const Plan& plan, std::size_t commit_every, std::uint64_t seed)
      : random_{seed},
        target_{model},
        near_{near},
        plan_{plan},
        commit_every_{commit_every},
        cache_{std::make_unique<Cache>(plan, cache_options())} {
    const auto prompt = add_prompt(20 + below(40));
    decoder_ = make_decoder();
    decoder_->read_prompt(prompt);
    catch_up(true);
    compare();
  }

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      const std::size_t operation = below(20);
      CAPTURE(i);
      CAPTURE(operation);
      switch (operation) {
        case 0: further_prompt(); break;
        case 1: fork(); break;
        case 2:
          if (commit_every_ == 0) take_back();
          break;
        case 3:
        case 4: abandon(); break;
        default: step();
      }
      compare();
    }
  }

  std::size_t accepted = 0, refused = 0, forks = 0, taken_back = 0, abandoned = 0, refreshes = 0;

 private:
  [[nodiscard]] std::size_t below(std::size_t n) { return random_() % n; }

  std::vector<int> add_prompt(std::size_t tokens) {
    const auto more = random_text(target_.vocabulary(), tokens, random_());
    text_.insert(text_.end(), more.begin(), more.end());
    return more;
  }

  // Drafts have caches of their own that have read nothing yet.
  std::unique_ptr<Decoder> make_decoder() {
    const auto small_cache = [&] {
      return small_caches_
          .emplace_back(std::make_unique<SmallCache>(
              triforce_draft_plan<float>(near_.llama().config().shape(), {.sinks = 4, .recent = 26}),
              cache_options()))
          .get();
    };
    using Self = SelectedDraft<RowByRow, Cache, AnyDraft>;
    const AnyDraft chain{ModelDraft{near_, *small_cache()}};
    const AnyDraft tree{TreeDraft{near_, *small_cache(), tree_of(9)}};
    Changing drafts{{chain, tree, AnyDraft{NgramDraft{}}, AnyDraft{RandomTree{target_.vocabulary()}},
                     AnyDraft{Self{target_, *cache_, AnyDraft{}}}, AnyDraft{Self{target_, *cache_, chain}},
                     AnyDraft{Self{target_, *cache_, tree, {.length = 5, .adapt = false}}}}};
    return std::make_unique<Decoder>(
        target_, *cache_, std::move(drafts),
        SpeculationOptions{.seed = random_(),
                           .length = 1 + below(12),
                           .adapt = false,
                           .refresh_selection = {.every = below(3) * 9, .min_tokens = 5},
                           .commit_every = commit_every_,
                           .prompt_chunk = prompt_chunk});
  }

  void step() {
    const LevelStatistics before = decoder_->statistics();
    const std::size_t refreshed = decoder_->refreshes();
    const DecodedStep done = decoder_->step();
    for (const NewToken& token : done.tokens) text_.push_back(token.token);
    const LevelStatistics& after = decoder_->statistics();
    accepted += after.accepted - before.accepted;
    refused += (after.positions - before.positions) - (after.accepted - before.accepted);
    refreshes += decoder_->refreshes() - refreshed;
    catch_up(false);
  }

  // Reads the draft tokens and abandons the step.
  void abandon() {
    REQUIRE(decoder_->begin());
    if (below(2) == 0) (void)target_.read(*cache_, decoder_->call());
    decoder_->abandon();
    ++abandoned;
  }

  void further_prompt() {
    decoder_->read_prompt(add_prompt(1 + below(70)));
    catch_up(true);
  }

  // Another decoder continues with a fork, and the old one is destroyed.
  void fork() {
    auto fork = std::make_unique<Cache>(cache_->fork());
    decoder_.reset();
    cache_ = std::move(fork);
    decoder_ = make_decoder();
    decoder_->continue_text(text_);
    due_ = true;
    ++forks;
  }

  void take_back() {
    const std::size_t most = cache_->tokens() - cache_->commit_point();
    const std::size_t rows = below(most + 1);
    cache_->truncate(cache_->tokens() - rows);
    text_.resize(text_.size() - rows);
    decoder_ = make_decoder();
    decoder_->continue_text(text_);
    control_ = std::make_unique<Cache>(plan_, cache_options());
    catch_up(true);
    taken_back += rows;
  }

  // The control cache reads all of the text but its last token: prompts in chunks, the rest one by one.
  void catch_up(bool prompt) {
    while (control_->tokens() + 1 < text_.size()) {
      const std::size_t left = text_.size() - 1 - control_->tokens();
      if (!prompt) commit_if_due(*control_, due_);
      const std::size_t count = prompt ? std::min(prompt_chunk, left) : 1;
      (void)target_.read(*control_, {.tokens = std::span{text_}.subspan(control_->tokens(), count),
                                     .logits = LogitsOf::none});
      due_ = false;
    }
    due_ = due_ || prompt;
  }
  void commit_if_due(Cache& cache, bool due) const {
    if (commit_every_ > 0 && (due || cache.tokens() % commit_every_ == 0)) cache.commit();
  }

  void compare() {
    REQUIRE(std::ranges::equal(decoder_->text(), text_));
    REQUIRE(cache_->tokens() == text_.size() - 1);
    REQUIRE(control_->tokens() == text_.size() - 1);
    Cache own = cache_->fork();
    Cache control = control_->fork();
    for (Cache* cache : {&own, &control}) {
      // Where no row is quantised, a commit changes nothing, so both caches commit before the comparison.
      commit_every_ == 0 ? cache->commit() : commit_if_due(*cache, due_);
    }
    CHECK(own.bytes() == control.bytes());
    const std::array last{text_.back()};
    const auto logits = target_.read(own, {.tokens = last});
    CHECK(logits == target_.read(control, {.tokens = last}));
    CHECK(own.bytes() == control.bytes());
  }

  using SmallCache = KvCache<float>;

  std::mt19937_64 random_;
  RowByRow target_;
  RowByRow near_;
  Plan plan_;
  std::size_t commit_every_;
  std::vector<int> text_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Cache> control_ = std::make_unique<Cache>(plan_, cache_options());
  bool due_ = false;  // the next step must commit
  std::vector<std::unique_ptr<SmallCache>> small_caches_;
  std::unique_ptr<Decoder> decoder_;
};

template <class Plan>
void play(const Plan& plan, const Llama& model, std::size_t commit_every, std::uint64_t seed,
          std::size_t operations) {
  CAPTURE(seed);
  const Llama near = with_noise(model, 0.05F, seed);
  Play<Plan> play{model, near, plan, commit_every, seed};
  play.run(operations / runs_share);
  MESSAGE("kept " << play.accepted << ", refused " << play.refused << " guesses; " << play.forks << " forks, "
                  << play.taken_back << " tokens taken back, " << play.abandoned << " steps abandoned, "
                  << play.refreshes << " refreshes");
  CHECK(play.accepted > 0);
  CHECK(play.refused > 0);
}

TEST_CASE("dense rows") {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const Llama model = tiny_llama({.vocabulary = 24, .layers = 2}, 40 + seed);
    play(triforce_plan<float>(model.config().shape(), {.chunk = 4, .budget = 16}), model, 0, seed, 90);
  }
}

TEST_CASE("heads of all policies, with commits at fixed positions of the text") {
  using Plan = HeadPlan<float>;
  using PerToken = PerTokenStorage<float>;
  using PerChannel = PerChannelStorage<float>;
  for (const std::uint64_t seed : {4, 5}) {
    const Llama model = tiny_llama({.vocabulary = 20, .layers = 2, .kv_heads = 4}, 40 + seed);
    const PerToken::Config rows4{.bits = 4, .residual = 6};
    const PerChannel::Config channels4{.bits = 4, .key_group = 8, .residual = 6};
    const std::vector<HeadSettings<float>> heads{
        FullCache<DenseStorage<float>>::Config{},
        SinkRecentCache<DenseStorage<float>>::Config{.sinks = 3, .recent = 20},
        ChunkRetrievalCache<DenseStorage<float>, MinMaxKey>::Config{.chunk = 4, .budget = 12},
        QuantizedResidualCache<float, Granularity::per_channel>::Config{.storage = channels4},
        SinkRecentCache<PerToken>::Config{.sinks = 2, .recent = 26, .storage = rows4},
        ChunkRetrievalCache<PerChannel>::Config{.chunk = 8, .budget = 16, .storage = channels4},
        HeadBudgetCache<PerToken>::Config{.budget = 40, .storage = rows4},
        ChunkRetrievalCache<PerToken>::Config{.chunk = 4, .budget = 8, .storage = rows4},
    };
    Plan plan{model.config().shape()};
    for (std::size_t i = 0; i < heads.size(); ++i) plan.set(i / 4, i % 4, heads[i]);
    play(plan, model, 11 + seed, seed, 80);
  }
}

}  // namespace
}  // namespace kvpolicy::reference::speculation_interleaving_test
