// SPDX-License-Identifier: Apache-2.0
#include "speculation_run.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/cost_model.hpp>

#include "../common/stopwatch.hpp"

namespace kvpolicy::tools {
namespace {

// Tokens that one decoder produces before the other one catches up.
constexpr std::size_t piece = 32;

double ratio(double part, double whole) {
  return whole > 0.0 ? part / whole : std::numeric_limits<double>::quiet_NaN();
}

// One decoder, while it goes through a turn.
class Decoding {
 public:
  explicit Decoding(SpeculativeText& text) : text_{&text} {}

  void begin(const SpeculationTurn& turn) {
    turn_ = &turn;
    tokens_.clear();
    ending_ = Ending::open;
  }

  /// Decodes until the turn has at least `count` tokens or ends.
  template <class OnStep>
  void reach(std::size_t count, const OnStep& on_step) {
    while (ending_ == Ending::open && tokens_.size() < count) {
      if (tokens_.size() >= turn_->most_new) {
        ending_ = Ending::length;
        break;
      }
      const std::size_t judged = text_->guessed();
      const Stopwatch watch;
      DecodedStep step = text_->step(turn_->most_new - tokens_.size());
      const double seconds = watch.seconds();
      ending_ = step.ending;
      if (ending_ == Ending::stop_token && turn_->past_stop_tokens) {
        text_->reopen();
        ending_ = Ending::open;
      }
      cut(step.tokens);
      for (const NewToken& token : step.tokens) tokens_.push_back(token.token);
      if (ending_ == Ending::open && tokens_.size() >= turn_->most_new) ending_ = Ending::length;
      on_step(SpeculationStep{0, text_->guessed() - judged, std::move(step.tokens), seconds});
    }
  }

  [[nodiscard]] bool open() const { return ending_ == Ending::open; }
  [[nodiscard]] Ending ending() const { return ending_; }
  [[nodiscard]] const std::vector<int>& tokens() const { return tokens_; }

 private:
  // Drops what follows the stop text, which may begin in an earlier step.
  void cut(std::vector<NewToken>& fresh) {
    if (!turn_->stops) return;
    std::vector<int> said = tokens_;
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      said.push_back(fresh[i].token);
      if (!turn_->stops(said)) continue;
      fresh.resize(i + 1);
      ending_ = Ending::stop_token;
      return;
    }
  }

  SpeculativeText* text_;
  const SpeculationTurn* turn_ = nullptr;
  std::vector<int> tokens_;  // of the turn
  Ending ending_ = Ending::open;
};

SpeculationSetup plain_setup(const SpeculativeText& text) {
  SpeculationSetup setup = text.setup();
  setup.structure = Structure::plain;
  return setup;
}

}  // namespace

double SpeculationResult::seconds_per_token() const { return ratio(seconds, static_cast<double>(tokens)); }
double SpeculationResult::plain_seconds_per_token() const {
  return ratio(plain_seconds, static_cast<double>(plain_tokens));
}
double SpeculationResult::speedup() const { return ratio(plain_seconds_per_token(), seconds_per_token()); }
double SpeculationResult::tokens_per_verification() const {
  return ratio(static_cast<double>(tokens), static_cast<double>(steps.size()));
}
double SpeculationResult::predicted_tokens_per_verification() const {
  double expected = 0.0;
  const double acceptance = levels.front().judged > 0 ? levels.front().acceptance() : 0.0;
  for (const SpeculationStep& step : steps) expected += expected_tokens(acceptance, step.guessed);
  return ratio(expected, static_cast<double>(steps.size()));
}
double SpeculationResult::predicted_speedup() const {
  const double expected = predicted_tokens_per_verification() * static_cast<double>(steps.size());
  return ratio(plain_seconds_per_token(), ratio(seconds, expected));
}

std::vector<NewToken> SpeculationResult::tokens_of_turn(std::size_t turn) const {
  std::vector<NewToken> all;
  for (const SpeculationStep& step : steps) {
    if (step.turn == turn) all.insert(all.end(), step.tokens.begin(), step.tokens.end());
  }
  return all;
}

SpeculationResult run_speculation(SpeculativeText& text, const std::vector<SpeculationTurn>& turns,
                                  bool beside_plain, const SpeculationWatcher& watcher) {
  SpeculationResult result;
  std::unique_ptr<SpeculativeText> plain;
  Decoding decoding{text};
  result.same_text = beside_plain;
  for (std::size_t turn = 0; turn < turns.size(); ++turn) {
    const Stopwatch prefill;
    text.read(turns[turn].prompt, watcher.reads);
    result.prompt_tokens += turns[turn].prompt.size();
    if (turn == 0) {
      result.prefill_seconds = prefill.seconds();
      // Warms up on forks that are then dropped, because first calls of some libraries are slow.
      static_cast<void>(text.fork(text.setup())->step());
      if (beside_plain) plain = text.fork(plain_setup(text));
    } else if (plain) {
      plain->read(turns[turn].prompt);
    }
    if (watcher.begins) watcher.begins(turn);

    decoding.begin(turns[turn]);
    std::unique_ptr<Decoding> slow;
    if (plain) {
      slow = std::make_unique<Decoding>(*plain);
      slow->begin(turns[turn]);
    }
    while (decoding.open()) {
      decoding.reach(decoding.tokens().size() + piece, [&](SpeculationStep step) {
        step.turn = turn;
        result.seconds += step.seconds;
        result.tokens += step.tokens.size();
        for (const NewToken& token : step.tokens) {
          if (watcher.token) watcher.token(token);
        }
        result.steps.push_back(std::move(step));
      });
      if (!slow) continue;
      slow->reach(decoding.tokens().size(), [&](const SpeculationStep& step) {
        result.plain_seconds += step.seconds;
        result.plain_tokens += step.tokens.size();
      });
    }
    result.endings.push_back(decoding.ending());
    if (slow && slow->tokens() != decoding.tokens()) result.same_text = false;
    if (watcher.ends) watcher.ends(turn);
  }
  result.levels = text.levels();
  result.refreshes = text.refreshes();
  return result;
}

}  // namespace kvpolicy::tools
