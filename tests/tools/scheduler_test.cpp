// SPDX-License-Identifier: Apache-2.0
//
// Continuous batching: every text gets the tokens that it would get alone, whatever joins, waits, is moved out or
// shares a prefix with it, and the budget holds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
#include <kvpolicy/offload/file_resource.hpp>

#include "echo_model.hpp"
#include "offload/recording_calls.hpp"
#include "serve/scheduler.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::serve;

namespace {

struct Served {
  std::vector<int> prompt;
  std::size_t max_new = 0;
  std::size_t cancel_after = 0;  // 0: never
  std::vector<int> got;
  std::optional<Outcome> outcome;
  std::uint64_t id = 0;
};

}  // namespace

TEST_CASE("random requests get the tokens that they would get alone, within the budget") {
  const std::vector<std::shared_ptr<const Plan>> plans{plan_of(0), plan_of(1), plan_of(2), plan_of(3)};
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    const auto below = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
    EchoModel model;
    double time = 0;
    SchedulerOptions options;
    options.memory = 400'000 + 200'000 * (seed % 3);
    options.swap_memory = seed % 4 == 0 ? 0 : 1'000'000;
    options.step_tokens = 16 + 20 * (seed % 5);
    options.max_running = 3 + seed % 6;
    options.patience = 0.5;
    options.slice = 6;
    options.mark_every = seed % 2 == 0 ? 50 : 0;
    options.page_rows = 16;
    options.now = [&] { return time; };
    std::vector<std::unique_ptr<Served>> all;
    std::size_t moved = 0;
    std::size_t cached = 0;
    {
      Scheduler scheduler{model, options};
      std::vector<std::vector<int>> systems;
      for (int i = 0; i < 3; ++i) {
        std::vector<int> system(20 + below(150));
        for (int& token : system) token = static_cast<int>(below(vocabulary));
        systems.push_back(system);
      }
      for (std::size_t steps = 0; steps < 3000; ++steps) {
        time += 0.03;
        if (all.size() < 60 && below(6) == 0) {
          auto one = std::make_unique<Served>();
          one->prompt = systems[below(systems.size())];
          const std::size_t system = one->prompt.size();
          const std::size_t more = 1 + below(120);
          for (std::size_t i = 0; i < more; ++i) one->prompt.push_back(static_cast<int>(below(vocabulary)));
          one->max_new = 1 + below(80);
          one->cancel_after = below(8) == 0 ? 1 + below(20) : 0;
          Request request;
          request.prompt = one->prompt;
          if (below(2) == 0) request.marks = {system};
          request.max_new = one->max_new;
          request.plan = plans[below(plans.size())];
          Served* served = one.get();
          request.on_token = [served](int token) {
            REQUIRE(!served->outcome);
            served->got.push_back(token);
            return true;
          };
          request.on_end = [served](const Outcome& outcome) {
            REQUIRE(!served->outcome);
            served->outcome = outcome;
          };
          one->id = scheduler.submit(std::move(request));
          all.push_back(std::move(one));
        }
        for (const auto& one : all) {
          if (one->cancel_after > 0 && one->got.size() >= one->cancel_after) scheduler.cancel(one->id);
        }
        scheduler.step();
        REQUIRE(scheduler.memory().live_bytes() <= options.memory);
      }
      time += 1;
      scheduler.step();
      const Snapshot last = scheduler.snapshot();
      CHECK(last.requests.empty());
      CHECK(last.promised_bytes == 0);
      CHECK(last.swapped_bytes == 0);
      CHECK(last.live_bytes == last.prefix_only_bytes);
      CHECK(last.counters.moved_out >= last.counters.moved_in);
      moved = last.counters.moved_in;
      cached = last.counters.cached_tokens;
      if (seed % 4 == 0) CHECK(moved == 0);
    }
    CHECK(model.failures == 0);
    CHECK(model.most_calls > 1);
    CHECK(all.size() > 40);
    for (const auto& one : all) {
      REQUIRE(one->outcome);
      CHECK(one->outcome->reason != FinishReason::failed);
      const std::vector<int> expected = alone(one->prompt, one->max_new);
      if (one->outcome->reason == FinishReason::cancelled) {
        REQUIRE(one->got.size() <= expected.size());
        CHECK(std::equal(one->got.begin(), one->got.end(), expected.begin()));
      } else {
        CHECK(one->got == expected);
        CHECK(one->outcome->new_tokens == expected.size());
      }
    }
    MESSAGE("seed " << seed << ": moved in " << moved << ", cached tokens " << cached);
  }
}

TEST_CASE("a prompt is cut where it is cut alone, whoever is served beside it") {
  using Reads = std::vector<EchoModel::Piece>;
  constexpr int texts = 12;
  const auto run = [](int first, int last) {
    std::mt19937_64 random{5};
    EchoModel model;
    model.end = -1;
    model.notes_reads = true;
    SchedulerOptions options;
    options.step_tokens = 40;
    options.mark_every = 64;
    options.page_rows = 16;
    Scheduler scheduler{model, options};
    std::size_t steps = 0;
    for (int i = 0; i < texts; ++i) {
      const std::size_t prompt = 10 + random() % 300;
      const std::size_t mark = 1 + random() % (prompt - 1);
      const std::size_t waits = random() % 4;
      if (i < first || i >= last) continue;
      Request request;
      request.prompt.assign(prompt, vocabulary + i);  // known by tokens that none writes
      request.marks = {mark};
      request.max_new = 5;
      request.plan = plan_of(static_cast<std::size_t>(i) % 4);
      request.on_token = [](int) { return true; };
      static_cast<void>(scheduler.submit(std::move(request)));
      for (std::size_t step = 0; step < waits; ++step, ++steps) static_cast<void>(scheduler.step());
    }
    while (scheduler.step()) ++steps;
    std::map<int, Reads> pieces;  // of each prompt
    for (const EchoModel::Piece& read : model.reads) {
      if (read.first >= vocabulary) pieces[read.first].push_back(read);
    }
    return std::pair{pieces, steps};
  };
  const auto [together, steps] = run(0, texts);
  std::size_t steps_alone = 0;
  for (int i = 0; i < texts; ++i) {
    CAPTURE(i);
    const auto [alone, own] = run(i, i + 1);
    REQUIRE(alone.contains(vocabulary + i));
    CHECK(together.at(vocabulary + i) == alone.at(vocabulary + i));
    steps_alone += own;
  }
  CHECK(steps < steps_alone);  // they did share steps
}

TEST_CASE("a text whose rows were moved out and cannot be read again fails alone") {
  const testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  offload::FileResource file{{.folder = folder.path().string(), .max_bytes = std::size_t{1} << 24}, calls};
  EchoModel model;
  model.end = -1;
  double time = 0;
  std::string told;
  SchedulerOptions options;
  options.swap_memory = std::size_t{1} << 20;
  options.swap_to = &file;
  options.page_rows = 16;
  options.patience = 0.5;
  options.slice = 5;
  options.mark_every = 0;
  options.now = [&] { return time; };
  options.tell = [&](const std::string& line) { told += line; };
  const std::shared_ptr<const Plan> plan = plan_of(0);
  constexpr std::size_t prompt = 20, max_new = 60;
  options.memory = Scheduler{model, options}.peak_bytes(*plan, prompt, max_new) * 3 / 2;  // one at a time
  std::vector<Outcome> outcomes;  // as long as the scheduler
  Scheduler scheduler{model, options};
  for (int i = 0; i < 2; ++i) {
    Request request;
    request.prompt.assign(prompt, i);
    request.max_new = max_new;
    request.plan = plan;
    request.on_token = [](int) { return true; };
    request.on_end = [&](const Outcome& outcome) {
      outcomes.push_back(outcome);
      calls.errors.clear();
    };
    static_cast<void>(scheduler.submit(std::move(request)));
  }
  for (; scheduler.snapshot().counters.moved_out == 0; time += 0.1) REQUIRE(scheduler.step());
  calls.errors = {{"populate", EFAULT}, {"read", EIO}};
  for (; scheduler.step(); time += 0.1) {
  }
  REQUIRE(outcomes.size() == 2);
  CHECK(outcomes[0].reason == FinishReason::failed);
  CHECK(outcomes[0].error == "rows that were moved out cannot be read");
  CHECK(outcomes[0].new_tokens < max_new);
  CHECK(outcomes[1].reason == FinishReason::length);
  CHECK(outcomes[1].new_tokens == max_new);
  CHECK(told.starts_with("not brought back: "));
  CHECK(told.find("Input/output error") != std::string::npos);
  CHECK(scheduler.snapshot().swapped_bytes == 0);
  CHECK(file.live_bytes() == 0);
}

TEST_CASE("what can never be served is refused at once") {
  EchoModel model;
  SchedulerOptions options;
  options.memory = 200'000;
  options.max_running = 1;
  options.max_waiting = 1;
  Scheduler scheduler{model, options};
  const auto submit = [&](std::size_t prompt, std::size_t max_new, std::vector<std::size_t> marks = {}) {
    Request request;
    request.prompt.assign(prompt, 1);
    request.max_new = max_new;
    request.marks = std::move(marks);
    request.plan = plan_of(0);
    request.plan_name = "full";
    request.on_token = [](int) { return true; };
    return scheduler.submit(std::move(request));
  };
  CHECK_THROWS_AS(submit(0, 1), ShapeError);
  CHECK_THROWS_AS(submit(1, 0), ConfigError);
  CHECK_THROWS_AS(submit(1999, 100), CapacityError);
  CHECK_THROWS_AS(submit(1000, 900), CapacityError);
  CHECK_THROWS_AS(submit(10, 1'000'000'000), CapacityError);
  CHECK_THROWS_AS(submit(10, 1, {5, 2}), ConfigError);
  CHECK(submit(10, 5) == 1);
  CHECK(submit(10, 5) == 2);
  CHECK_THROWS_AS(submit(10, 5), QueueFull);
  while (scheduler.step()) {
  }
  CHECK(submit(10, 5) == 3);
  CHECK(scheduler.snapshot().counters.refused == 1);
  scheduler.stop();
  CHECK_THROWS_AS(submit(10, 5), Stopping);
}

TEST_CASE("as many run as may, also where none may wait") {
  EchoModel model;
  SchedulerOptions options;
  options.max_running = 2;
  options.max_waiting = 0;
  std::size_t ended = 0;  // as long as the scheduler, which ends what is left
  Scheduler scheduler{model, options};
  const auto submit = [&] {
    Request request;
    request.prompt.assign(10, 1);
    request.max_new = 5;
    request.plan = plan_of(0);
    request.on_token = [](int) { return true; };
    request.on_end = [&](const Outcome&) { ++ended; };
    return scheduler.submit(std::move(request));
  };
  CHECK(submit() == 1);
  CHECK(submit() == 2);
  CHECK_THROWS_AS(submit(), QueueFull);
  CHECK(scheduler.step());
  CHECK(scheduler.running() == 2);
  CHECK_THROWS_AS(submit(), QueueFull);
  while (scheduler.step()) {
  }
  CHECK(ended == 2);
  CHECK(submit() == 3);
}

TEST_CASE("requests that come together read what they have in common once") {
  EchoModel model;
  SchedulerOptions options;
  options.step_tokens = 40;
  options.mark_every = 0;
  options.page_rows = 16;
  Scheduler scheduler{model, options};
  std::vector<int> system(300);
  for (std::size_t i = 0; i < system.size(); ++i) system[i] = static_cast<int>(i * i % 190);
  constexpr std::size_t count = 6;
  std::vector<Served> all(count);
  // The last one has another plan, which shares nothing.
  for (std::size_t i = 0; i < count; ++i) {
    Served& one = all[i];
    one.prompt = system;
    for (std::size_t more = 0; more <= i; ++more) one.prompt.push_back(static_cast<int>(i));
    Request request;
    request.prompt = one.prompt;
    request.marks = {system.size()};
    request.max_new = 5;
    request.plan = plan_of(i + 1 == count ? 2 : 1);
    request.on_token = [&one](int token) {
      one.got.push_back(token);
      return true;
    };
    request.on_end = [&one](const Outcome& outcome) { one.outcome = outcome; };
    one.id = scheduler.submit(std::move(request));
  }
  scheduler.step();
  CHECK(scheduler.running() == 2);
  SUBCASE("to their ends") {}
  SUBCASE("also if the one that reads it goes away") { scheduler.cancel(all[0].id); }
  while (scheduler.step()) {
  }
  std::size_t cached = 0;
  for (const Served& one : all) {
    REQUIRE(one.outcome);
    if (one.outcome->reason == FinishReason::cancelled) continue;
    CHECK(one.got == alone(one.prompt, 5));
    cached += one.outcome->cached_tokens;
  }
  CHECK(cached ==
        (all[0].outcome->reason == FinishReason::cancelled ? count - 3 : count - 2) * system.size());
}
