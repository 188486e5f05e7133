// SPDX-License-Identifier: Apache-2.0
//
// Speculative decoding that equals plain decoding to the last bit, with a model and an engine whose sums do
// not depend on how many tokens a call reads. Every logit of a verification is that of plain decoding, for
// dense rows and for quantised ones, whose codes would magnify any difference.
//
// Quantised rows need one more rule. A row is exact until it is committed and has left the residual, so the
// rows that a token reads depend on when rows are committed. By default a cache commits rows at the beginning
// of each call, up to `max_rollback` rows before the latest: all tokens of a verification then read what its
// first one may read, where plain decoding would have committed rows between them. With `commit_every`, which
// is set by default over such caches, both commit at the same positions of the text.
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shipped_policies.hpp>

#include "model/guessing.hpp"

namespace kvpolicy::reference::bitwise_speculation_test {
namespace {

constexpr std::size_t prompt_chunk = 32;
constexpr std::size_t tokens = 32;

struct Models {
  explicit Models(std::size_t which)
      : target{tiny_llama({.vocabulary = 20 + which,
                           .layers = 1 + which % 2,
                           .q_heads = 4,
                           .kv_heads = which % 2 == 0 ? 2U : 4U},
                          500 + which)},
        near{with_noise(target, 0.06F, 600 + which)},
        prompt{random_text(20 + which, 26 + 11 * which, 700 + which)} {}

  Llama target, near;
  std::vector<int> prompt;
};

// Decodes once plainly, and then speculatively.
template <class Plan>
class Decoded {
 public:
  Decoded(const Models& models, Plan plan, std::size_t commit_every)
      : models_{&models},
        plan_{std::move(plan)},
        commit_every_{commit_every},
        cache_{plan_, cache_options()},
        plain_{decode_plainly(RowByRow{models.target}, cache_, models.prompt, prompt_chunk, tokens,
                              commit_every)} {}

  [[nodiscard]] const PlainText& plain() const { return plain_; }

  LevelStatistics compare(Setting setting) const {
    CAPTURE(static_cast<int>(setting.guesser));
    CAPTURE(setting.length);
    setting.prompt_chunk = prompt_chunk;
    setting.commit_every = commit_every_;
    Watched<RowByRow> target{models_->target, plain_};
    Cache cache{plan_, cache_options()};
    const Outcome outcome =
        decode_with_guesses(target, models_->target, cache, models_->near, models_->prompt, tokens, setting);
    CHECK(outcome.text == plain_.text);
    CHECK(target.deviation() == 0.0F);
    CHECK(target.compared() >= tokens);
    CHECK(cache.tokens() == cache_.tokens());
    CHECK(cache.bytes() == cache_.bytes());
    return outcome.statistics;
  }

 private:
  using Cache = KvCache<typename Plan::element_type>;

  const Models* models_;
  Plan plan_;
  std::size_t commit_every_;
  Cache cache_;
  PlainText plain_;
};

// Runs every draft once.
template <class Plan>
void compare_all(const Models& models, const Plan& plan, std::size_t commit_every, std::size_t turn) {
  CAPTURE(commit_every);
  const Decoded<Plan> decoded{models, plan, commit_every};
  std::size_t accepted = 0, places = 0;
  for (const Guesser guesser : guessers) {
    if (++turn % runs_share != 0) continue;
    const LevelStatistics statistics =
        decoded.compare({.guesser = guesser, .length = 2 + turn % 15, .adapt = turn % 4 == 0});
    accepted += statistics.accepted;
    places += statistics.positions;
  }
  MESSAGE("kept " << accepted << " of " << places << " guesses");
  if (runs_share > 1) return;  // a few drafts may have all their tokens accepted
  CHECK(accepted > 0);
  CHECK(accepted < places);
}

template <Element E>
auto quantized(const Models& models, std::size_t bits) {
  return quantized_triforce_plan<E>(models.target.config().shape(), {.chunk = 8, .budget = 16},
                                    {.bits = bits, .residual = 8});
}

TEST_CASE("dense rows of every type") {
  const auto plan_of = [](const Models& models, auto element) {
    return triforce_plan<decltype(element)>(models.target.config().shape(), {.chunk = 4, .budget = 12});
  };
  compare_all(Models{0}, plan_of(Models{0}, float{}), 0, 0);
  compare_all(Models{1}, plan_of(Models{1}, bfloat16{}), 0, 3);
  compare_all(Models{2}, plan_of(Models{2}, float16{}), 0, 5);
}

TEST_CASE("quantised rows that are committed at the same positions of the text") {
  const Models two{3}, four{4}, eight{5}, rare{6};
  compare_all(two, quantized<float>(two, 2), 6, 1);
  compare_all(four, quantized<float>(four, 4), 16, 2);
  compare_all(eight, quantized<bfloat16>(eight, 8), 10, 3);
  // Commits as rarely as the cache allows.
  compare_all(rare, quantized<bfloat16>(rare, 4), cache_options().max_rollback, 4);
}

TEST_CASE("heads of all policies in one plan") {
  using Plan = HeadPlan<float>;
  using PerToken = PerTokenStorage<float>;
  using PerChannel = PerChannelStorage<float>;
  const PerToken::Config rows4{.bits = 4, .residual = 6};
  const PerChannel::Config channels4{.bits = 4, .key_group = 8, .residual = 6};
  const std::vector<HeadSettings<float>> heads{
      FullCache<DenseStorage<float>>::Config{},
      SinkRecentCache<DenseStorage<float>>::Config{.sinks = 3, .recent = 20},
      ChunkRetrievalCache<DenseStorage<float>>::Config{.chunk = 4, .budget = 12},
      QuantizedResidualCache<float, Granularity::per_channel>::Config{.storage = channels4},
      SinkRecentCache<PerToken>::Config{.sinks = 2, .recent = 26, .storage = rows4},
      ChunkRetrievalCache<PerChannel, MinMaxKey>::Config{.chunk = 8, .budget = 16, .storage = channels4},
      HeadBudgetCache<PerToken>::Config{.budget = 40, .storage = rows4},
      ChunkRetrievalCache<PerToken>::Config{.chunk = 4, .budget = 8, .refresh_every = 5, .storage = rows4},
  };
  const Models models{7};  // 2 layers of 4 KV heads
  Plan plan{models.target.config().shape()};
  for (std::size_t i = 0; i < heads.size(); ++i) plan.set(i / 4, i % 4, heads[i]);
  compare_all(models, plan, 16, 2);
}

TEST_CASE("quantised rows that the cache commits by itself: refused guesses leave no trace") {
  // A verification's tokens read rows that plain decoding would have quantised, so the texts differ, and not
  // only at near ties. But refused draft tokens must leave no trace: a cache that reads the text in the same
  // runs, with accepted tokens only, gives the same logits to the last bit. (A draft over the target's own
  // cache makes the cache commit earlier, so this holds only for drafts with caches of their own.)
  std::size_t runs = 0, differing = 0;
  for (std::size_t which = 0; which < 12; which += 2 * runs_share) {
    const Models models{which};
    const auto plan = quantized<float>(models, 4);
    const Decoded decoded{models, plan, 0};
    RowByRow target{models.target};
    LlamaReader near{models.near};
    KvCache cache{plan, cache_options()};
    KvCache<float, CpuEngine> near_cache{triforce_draft_plan<float>(models.near.config().shape()),
                                         cache_options()};
    SpeculativeDecoder decoder{
        target, cache, ModelDraft{near, near_cache},
        SpeculationOptions{.length = 6, .adapt = false, .commit_every = 0, .prompt_chunk = prompt_chunk}};
    decoder.read_prompt(models.prompt);

    KvCache replayed{plan, cache_options()};
    for (std::size_t done = 0; done + 1 < models.prompt.size();) {
      const std::size_t count = std::min(prompt_chunk, models.prompt.size() - 1 - done);
      (void)target.read(replayed, {.tokens = std::span{models.prompt}.subspan(done, count)});
      done += count;
    }
    while (decoder.text().size() < decoded.plain().text.size()) {
      const std::size_t before = decoder.text().size();
      const std::size_t count = decoder.step().tokens.size();
      const auto logits = target.read(
          replayed, {.tokens = decoder.text().subspan(before - 1, count), .logits = LogitsOf::all});
      for (std::size_t i = 0; i < count; ++i) {
        const auto row = std::span{logits}.subspan(i * target.vocabulary(), target.vocabulary());
        CHECK(std::ranges::max_element(row) - row.begin() == decoder.text()[before + i]);
      }
      CHECK(replayed.tokens() == cache.tokens());
      CHECK(replayed.bytes() == cache.bytes());
    }
    ++runs;
    const auto& plain = decoded.plain().text;
    differing += std::ranges::equal(plain, decoder.text().first(plain.size())) ? 0 : 1;
  }
  MESSAGE(differing << " of " << runs << " texts differ from plain decoding without commit_every");
  // Otherwise the tests above would pass without the rule.
  if (runs_share == 1) CHECK(differing > 0);
}

// Sets only options that decoding with and without drafts have in common.
template <class Plan>
void compare_by_default(const Models& models, const Plan& plan, std::size_t turn) {
  const std::size_t rows = cache_options().max_rollback;
  RowByRow target{models.target};
  KvCache cache{plan, cache_options()};
  SpeculativeDecoder plain{target, cache, NoDraft{},
                           SpeculationOptions{.length = 0, .adapt = false, .prompt_chunk = prompt_chunk}};
  CHECK(plain.commit_every() == (plan.commit_changes_rows() ? rows : 0));
  plain.read_prompt(models.prompt);
  plain.generate(tokens);
  // A user's own decoding loop, as the decoder's options describe it.
  KvCache own{plan, cache_options()};
  for (std::size_t done = 0; done + 1 < models.prompt.size();) {
    const std::size_t count = std::min(prompt_chunk, models.prompt.size() - 1 - done);
    (void)target.read(own, {.tokens = std::span{models.prompt}.subspan(done, count)});
    done += count;
  }
  std::vector<int> text = models.prompt;
  const std::size_t every = plain.commit_every();
  own.commit();
  for (std::size_t i = 0; i < tokens; ++i) {
    if (every > 0 && own.tokens() % every == 0) own.commit();
    const std::vector<float> logits = target.read(own, {.tokens = std::span{text}.last(1)});
    text.push_back(static_cast<int>(std::ranges::max_element(logits) - logits.begin()));
  }
  CHECK(std::ranges::equal(text, plain.text()));
  for (const Guesser guesser : guessers) {
    if (++turn % runs_share != 0) continue;
    CAPTURE(static_cast<int>(guesser));
    RowByRow judge{models.target};
    KvCache judged{plan, cache_options()};
    const Outcome outcome = decode_with_guesses(
        judge, models.target, judged, models.near, models.prompt, tokens,
        {.guesser = guesser, .length = 2 + turn % 12, .adapt = turn % 4 == 0, .prompt_chunk = prompt_chunk});
    CHECK(std::ranges::equal(outcome.text, plain.text()));
    CHECK(outcome.statistics.tokens == tokens);
  }
}

TEST_CASE("by default quantised targets decode the text of plain decoding") {
  for (std::size_t which = 0; which < 12; ++which) {
    CAPTURE(which);
    const Models models{which};
    for (const std::size_t bits : {2U, 4U}) {
      CAPTURE(bits);
      compare_by_default(models, quantized<float>(models, bits), which + bits);
    }
  }
  // One quantised head is enough, with keys per channel or with rows per token.
  const Models models{7};
  using Channels = QuantizedResidualCache<float, Granularity::per_channel>;
  HeadPlan<float> plan{models.target.config().shape()};
  plan.set(1, 2, Channels::Config{.storage = {.bits = 2, .key_group = 8, .residual = 8}});
  compare_by_default(models, plan, 1);
}

TEST_CASE("plans say whether a commit changes rows, and dense ones are committed as decoding continues") {
  const ModelShape shape = Models{1}.target.config().shape();
  CHECK_FALSE(triforce_plan<float16>(shape).commit_changes_rows());
  CHECK(quantized_triforce_plan<float16>(shape).commit_changes_rows());
  using Window = SinkRecentCache<DenseStorage<float>>;
  using PackedWindow = SinkRecentCache<PerTokenStorage<float>>;
  HeadPlan<float> plan{shape};
  CHECK_FALSE(plan.commit_changes_rows());
  plan.set(0, 1, Window::Config{.sinks = 1, .recent = 8});
  CHECK_FALSE(plan.commit_changes_rows());
  plan.set(0, 2, PackedWindow::Config{.sinks = 1, .recent = 8});
  CHECK(plan.commit_changes_rows());
  CHECK(KvCache{plan, cache_options()}.commit_changes_rows());
  const Models models{0};
  compare_by_default(models, triforce_plan<float>(models.target.config().shape(), {.budget = 16}), 0);
}

TEST_CASE("commit_every must fit the cache") {
  const Models models{0};
  RowByRow target{models.target};
  KvCache cache{quantized<float>(models, 4), cache_options()};
  const auto decoder = [&](std::size_t commit_every) {
    return SpeculativeDecoder{target, cache, NoDraft{},
                              SpeculationOptions{.length = 0, .adapt = false, .commit_every = commit_every}};
  };
  CHECK(decoder(0).commit_every() == 0);
  CHECK_NOTHROW((void)decoder(24));
  CHECK_THROWS_AS((void)decoder(25), ConfigError);
}

}  // namespace
}  // namespace kvpolicy::reference::bitwise_speculation_test
