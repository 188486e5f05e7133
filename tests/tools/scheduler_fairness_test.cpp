// SPDX-License-Identifier: Apache-2.0
//
// Nobody waits for ever: a long text comes in, is read and is written in a number of steps that follows from the
// options, though short ones, of which some would always fit, never stop coming.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "echo_model.hpp"
#include "serve/scheduler.hpp"

using namespace kvpolicy;
using namespace kvpolicy::serve;

namespace {

constexpr double step_seconds = 0.03;

struct Scenario {
  bool moves_out;     // whether texts may be moved out
  bool same_opening;  // whether short texts begin as the long one does
  double more;        // memory, in the bytes that the long text takes at most
  std::size_t kind;   // of the plan
};

// Short texts without end, of which `queue` always wait, and a long one among them.
class EndlessStream {
 public:
  static constexpr std::size_t opening = 100;  // tokens, no multiple of a page
  static constexpr std::size_t short_prompt = 60, short_new = 30;
  static constexpr std::size_t long_prompt = 500, long_new = 120;
  static constexpr std::size_t queue = 6;

  EndlessStream(const Scenario& scenario, std::uint64_t seed)
      : scenario_{scenario}, plan_{plan_of(scenario.kind)}, random_{seed} {
    model_.end = -1;
    options_.swap_memory = scenario.moves_out ? 10'000'000 : 0;
    options_.step_tokens = 64;
    options_.max_running = 12;
    options_.max_waiting = 1000;
    options_.patience = 0.6;
    options_.slice = 20;
    options_.mark_every = 0;
    options_.page_rows = 16;
    options_.now = [this] { return static_cast<double>(steps_) * step_seconds; };
    options_.memory = 1 << 30;
    const std::size_t most = Scheduler{model_, options_}.peak_bytes(*plan_, long_prompt, long_new);
    options_.memory = static_cast<std::size_t>(static_cast<double>(most) * scenario.more);
    scheduler_.emplace(model_, options_);
    for (std::size_t i = 0; i < opening; ++i) opening_.push_back(token());
  }

  void step() {
    while (waiting_ < queue) submit(false);
    scheduler_->step();
    ++steps_;
  }
  void submit_long() {
    came_ = steps_;
    submit(true);
  }

  [[nodiscard]] std::size_t steps_to_first_token() const { return first_.value_or(steps_) - came_; }
  [[nodiscard]] std::size_t steps_to_end() const { return ended_.value_or(steps_) - came_; }
  [[nodiscard]] bool is_over() const { return ended_.has_value(); }
  [[nodiscard]] std::size_t short_ends() const { return short_ends_; }
  [[nodiscard]] std::size_t moved_out() const { return scheduler_->snapshot().counters.moved_out; }

  // Steps from coming, or from being moved out, until a text runs. Those that run, and those that came before it, are
  // read and write their answers; it grows impatient once, and those that passed meanwhile end too.
  [[nodiscard]] std::size_t longest_wait() const {
    const std::size_t prompt = short_prompt + (scenario_.same_opening ? opening : 0);
    const std::size_t at_once = options_.max_running + queue + 1;
    const std::size_t read = (at_once * prompt + options_.step_tokens - 1) / options_.step_tokens;
    const auto patience = static_cast<std::size_t>(options_.patience / step_seconds) + 2;
    return patience + 2 * (read + short_new);
  }
  // It is the oldest of those that read before long, and has half of every step then.
  [[nodiscard]] static std::size_t longest_read() { return long_prompt / 32 + 1; }
  // After each slice it may be moved out.
  [[nodiscard]] std::size_t longest_writing() const {
    const std::size_t slices = long_new / options_.slice + 1;
    return long_new + (scenario_.moves_out ? slices * longest_wait() : 0);
  }

 private:
  [[nodiscard]] int token() { return static_cast<int>(random_() % vocabulary); }

  void submit(bool is_long) {
    Request request;
    if (is_long || scenario_.same_opening) {
      request.prompt = opening_;
      request.marks = {opening};
    }
    const std::size_t size = is_long ? long_prompt : request.prompt.size() + short_prompt;
    while (request.prompt.size() < size) request.prompt.push_back(token());
    request.max_new = is_long ? long_new : short_new;
    request.plan = plan_;
    const auto has_begun = std::make_shared<bool>(false);
    if (!is_long) ++waiting_;
    request.on_token = [this, is_long, has_begun](int) {
      if (*has_begun) return true;
      *has_begun = true;
      if (is_long) {
        first_ = steps_;
      } else {
        --waiting_;
      }
      return true;
    };
    request.on_end = [this, is_long](const Outcome& outcome) {
      if (outcome.reason == FinishReason::cancelled) return;  // the test is over
      CHECK(outcome.reason == FinishReason::length);
      if (is_long) ended_ = steps_;
      if (!is_long) ++short_ends_;
    };
    static_cast<void>(scheduler_->submit(std::move(request)));
  }

  Scenario scenario_;
  std::shared_ptr<const Plan> plan_;
  std::mt19937_64 random_;
  EchoModel model_;
  SchedulerOptions options_;
  std::vector<int> opening_;
  std::size_t steps_ = 0;
  std::size_t waiting_ = 0;  // short texts without a token yet
  std::size_t came_ = 0;
  std::optional<std::size_t> first_, ended_;
  std::size_t short_ends_ = 0;
  std::optional<Scheduler> scheduler_;
};

}  // namespace

TEST_CASE("a long text's wait is bounded, though short ones never stop coming") {
  for (const bool moves_out : {false, true}) {
    for (const bool same_opening : {false, true}) {
      for (const double more : {1.0, 1.5}) {
        for (const std::size_t kind : {0U, 1U}) {
          CAPTURE(moves_out);
          CAPTURE(same_opening);
          CAPTURE(more);
          CAPTURE(kind);
          EndlessStream stream{{moves_out, same_opening, more, kind}, 7};
          for (int i = 0; i < 100; ++i) stream.step();
          const std::size_t before = stream.short_ends();
          CHECK(before > 0);
          stream.submit_long();
          const std::size_t wait = stream.longest_wait() + EndlessStream::longest_read();
          const std::size_t all = wait + stream.longest_writing();
          for (std::size_t i = 0; i < all && !stream.is_over(); ++i) stream.step();
          CHECK(stream.is_over());
          CHECK(stream.steps_to_first_token() <= wait);
          CHECK(stream.steps_to_end() <= all);
          MESSAGE("first token after " << stream.steps_to_first_token() << " of " << wait
                                       << " steps, end after " << stream.steps_to_end() << " of " << all
                                       << ", moved out " << stream.moved_out() << ", short ones meanwhile "
                                       << stream.short_ends() - before);
          // The short ones go on as well.
          for (int i = 0; i < 100; ++i) stream.step();
          CHECK(stream.short_ends() > before + 10);
        }
      }
    }
  }
}
