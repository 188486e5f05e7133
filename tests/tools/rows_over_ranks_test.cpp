// SPDX-License-Identifier: Apache-2.0
//
// A scheduler over ranks, which are threads here: every text gets the tokens that one process gives it, whatever
// waits, is moved out, or shares a prefix; the rank with least room decides; and a rank that is gone ends the others.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/kvpolicy.hpp>

#include "common/text_model.hpp"
#include "parallel/thread_ranks.hpp"
#include "serve/llama_served.hpp"
#include "serve/local_rows.hpp"
#include "serve/parallel_served.hpp"
#include "serve/rows_over_ranks.hpp"
#include "serve/scheduler.hpp"
#include "support/source_dir.hpp"
#include "support/temporary_folder.hpp"
#include "tool_plan.hpp"

using namespace kvpolicy;
using namespace kvpolicy::serve;
using reference::Communicator;

namespace {

const std::string& model_folder() {
  static const std::string folder = testing::source_dir() + "/reference_model/weights/keyfinder";
  return folder;
}
const tools::TextModel& model() {
  static const auto loaded = tools::TextModel::load(model_folder());
  return loaded;
}
std::shared_ptr<const Plan> plan_named(const std::string& name) {
  tools::PlanArguments arguments;
  arguments.plan = name;
  return std::make_shared<const Plan>(
      tools::make_plan<bfloat16>(arguments, model().config().shape(), model_folder()));
}

struct Question {
  std::string text;
  std::size_t system = 0;  // bytes that others begin with too
  std::shared_ptr<const Plan> plan;
  std::size_t max_new = 6;
};

std::vector<Question> questions(const std::vector<std::shared_ptr<const Plan>>& plans) {
  std::string system = "In the beginning God created the heaven and the earth. ";
  for (int i = 0; i < 3; ++i) system += system;
  std::vector<Question> all;
  for (std::size_t i = 0; i < 24; ++i) {
    const std::string opening = i % 2 == 0 ? system : system.substr(0, 100 + i);
    all.push_back({fmt::format("{}The key of Bamelo is {}. The sky is blue. What is the key of Bamelo? ",
                               opening, 10'000 + 777 * i),
                   opening.size(), plans[i % plans.size()], 4 + 3 * (i % 4)});
  }
  return all;
}

struct Answer {
  std::vector<int> tokens;
  std::optional<Outcome> outcome;
};

// Asks all at once, after the first one alone has left its prefixes.
std::vector<Answer> ask(
    Scheduler& scheduler, const std::vector<Question>& asked,
    const std::function<void()>& after_step = [] {}) {
  // A scheduler that ends early ends its requests, when this may be over.
  const auto shared = std::make_shared<std::vector<Answer>>(asked.size());
  std::vector<Answer>& answers = *shared;
  const auto submit = [&](std::size_t i) {
    Request request;
    request.prompt = model().encode(asked[i].text);
    request.marks = {asked[i].system};
    request.max_new = asked[i].max_new;
    request.sampler.temperature = 0;
    request.plan = asked[i].plan;
    request.on_token = [shared, i](int token) {
      (*shared)[i].tokens.push_back(token);
      return true;
    };
    request.on_end = [shared, i](const Outcome& outcome) { (*shared)[i].outcome = outcome; };
    scheduler.submit(std::move(request));
  };
  const auto run = [&] {
    for (std::size_t idle = 0; idle < 1000;) {
      idle = scheduler.step() ? 0 : idle + 1;
      after_step();
      if (std::ranges::all_of(answers, [](const Answer& one) { return one.outcome.has_value(); })) return;
      if (idle > 0 && !answers[1].outcome && answers[0].outcome && scheduler.snapshot().requests.empty())
        return;
    }
  };
  submit(0);
  run();
  for (std::size_t i = 1; i < asked.size(); ++i) submit(i);
  run();
  return answers;
}

SchedulerOptions options(std::size_t memory) {
  SchedulerOptions made;
  made.memory = memory;
  made.swap_memory = std::size_t{8} << 20;
  made.max_running = 12;
  made.patience = 0;
  made.slice = 2;
  made.mark_every = 200;
  return made;
}

// Rank 0's work with a scheduler, while the others follow.
void over_ranks(Communicator& ranks, const Plan& dividing, const SchedulerOptions& wanted,
                const std::function<void(Scheduler&, RowsOverRanks&, LocalRows&)>& work) {
  ParallelServed served{model(), dividing, 1000, ranks};
  LocalRows own{served, wanted, &ranks};
  if (ranks.rank() > 0) return follow(ranks, own);
  RowsOverRanks rows{ranks, own, served.shards()};
  {
    Scheduler scheduler{served, rows, wanted};
    work(scheduler, rows, own);
  }
  rows.stop();
}

std::string message_of(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("over ranks every text gets the tokens of one process") {
  const std::vector<std::shared_ptr<const Plan>> plans{
      plan_named("full"),      plan_named("duo:0.5"), plan_named("int8"),
      plan_named("headkv:64"), plan_named("quest"),   plan_named("criticalkv:64,compete=head")};
  const std::vector<Question> asked = questions(plans);
  LlamaServed whole{model()};
  Scheduler alone{whole, options(std::size_t{64} << 20)};
  const std::vector<Answer> expected = ask(alone, asked);
  for (const auto& machine : std::vector<std::pair<std::size_t, std::size_t>>{
           {2, std::size_t{64} << 20}, {2, std::size_t{5} << 19}, {3, std::size_t{7} << 18}}) {
    const std::size_t ranks = machine.first,
                      memory = machine.second;  // clang 14 captures no structured binding
    CAPTURE(ranks);
    CAPTURE(memory);
    std::vector<Answer> found;
    std::size_t most_running = 0;
    Counters counters;
    std::size_t evicted = 0;
    const auto thrown = test::run_ranks(ranks, [&](Communicator& them) {
      over_ranks(them, *plans[0], options(memory), [&](Scheduler& scheduler, RowsOverRanks&, LocalRows& own) {
        found = ask(scheduler, asked, [&] {
          REQUIRE(own.memory().live_bytes() <= memory);
          most_running = std::max(most_running, scheduler.running());
        });
        scheduler.step();
        const Snapshot last = scheduler.snapshot();
        counters = last.counters;
        evicted = last.prefix_statistics.evicted;
        CHECK(last.requests.empty());
        CHECK(last.promised_bytes == 0);
        CHECK(last.swapped_bytes == 0);
        CHECK(last.live_bytes == last.prefix_only_bytes);
      });
    });
    for (const std::exception_ptr& one : thrown) CHECK(message_of(one).empty());
    CHECK(most_running > 1);
    if (memory < std::size_t{4} << 20) CHECK(counters.moved_in > 0);
    if (memory > std::size_t{32} << 20) CHECK(counters.cached_tokens > 0);
    if (memory < std::size_t{4} << 20) CHECK(evicted > 0);
    std::size_t same = 0;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      CAPTURE(i);
      REQUIRE(found[i].outcome.has_value());
      CHECK(found[i].outcome->reason == FinishReason::length);
      CHECK(found[i].outcome->error.empty());
      // All ranks hold together what one process holds.
      if (i % plans.size() == 0) CHECK(found[i].outcome->kv_bytes == expected[i].outcome->kv_bytes);
      same += found[i].tokens == expected[i].tokens ? 1 : 0;
    }
    // Products are rounded in another order, which may decide between two letters now and then.
    CHECK(same >= asked.size() - 2);
  }
}

TEST_CASE("the rank with least room decides who comes in") {
  // Heads are divided as under the full plan; under the plan of the requests those of one rank take a quarter.
  const auto full = plan_named("full");
  const ModelShape shape = model().config().shape();
  const Shards shards = balance(*full, 1000, {.ranks = 2, .cut_rows = false});
  QuantizedResidualCache<bfloat16, Granularity::per_token>::Config small;
  small.storage.bits = 4;
  small.storage.residual = 16;
  auto uneven = std::make_shared<Plan>(shape);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (const HeadPart& part : shards.parts(layer, 0)) uneven->set(layer, part.head, small);
  }
  std::vector<Question> asked = questions({uneven});
  asked.resize(6);
  // Room for one text on rank 1, and for two on rank 0.
  std::array<std::size_t, 2> most{};
  for (const Question& one : asked) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      most[rank] = std::max(most[rank], plan_of_rank(*uneven, shards, rank)
                                            .peak_memory(one.text.size() + one.max_new, {}, one.text.size()));
    }
  }
  const std::size_t memory = most[1] + most[1] / 8;
  REQUIRE(2 * most[0] < memory);
  std::size_t most_running = 0;
  std::vector<Answer> answers;
  const auto thrown = test::run_ranks(2, [&](Communicator& them) {
    SchedulerOptions tight = options(memory);
    tight.swap_memory = 0;
    tight.mark_every = 0;
    over_ranks(them, *full, tight, [&](Scheduler& scheduler, RowsOverRanks& rows, LocalRows& own) {
      const std::size_t expected = own.peak_bytes(plan_of_rank(*uneven, shards, 1), 2000, 10);
      CHECK(rows.peak_bytes(*uneven, 2000, 10) == expected);
      CHECK(expected > own.peak_bytes(plan_of_rank(*uneven, shards, 0), 2000, 10));
      answers = ask(scheduler, asked, [&] { most_running = std::max(most_running, scheduler.running()); });
      // What can never fit on rank 1 is refused at once.
      Request huge;
      huge.prompt.assign(3000, 1);
      huge.plan = uneven;
      CHECK_THROWS_AS(scheduler.submit(std::move(huge)), CapacityError);
    });
  });
  for (const std::exception_ptr& one : thrown) CHECK(message_of(one).empty());
  CHECK(most_running == 1);
  for (const Answer& one : answers) {
    REQUIRE(one.outcome.has_value());
    CHECK(one.outcome->reason == FinishReason::length);
  }
}

TEST_CASE("plans that are the same on one rank and differ on another one do not mix their prefixes") {
  const auto full = plan_named("full");
  const Shards shards = balance(*full, 1000, {.ranks = 2, .cut_rows = false});
  auto other = std::make_shared<Plan>(*full);
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    for (const HeadPart& part : shards.parts(layer, 1))
      other->set(layer, part.head,
                 SinkRecentCache<DenseStorage<bfloat16>>::Config{.sinks = 4, .recent = 200});
  }
  REQUIRE(plan_of_rank(*full, shards, 0) == plan_of_rank(*other, shards, 0));
  const std::vector<Question> asked = questions({full, other});
  LlamaServed whole{model()};
  Scheduler alone{whole, options(std::size_t{64} << 20)};
  const std::vector<Answer> expected = ask(alone, asked);
  for (const std::size_t memory : {std::size_t{64} << 20, std::size_t{5} << 19}) {
    std::vector<Answer> found;
    for (const std::exception_ptr& one : test::run_ranks(2, [&](Communicator& them) {
           over_ranks(them, *full, options(memory), [&](Scheduler& scheduler, RowsOverRanks&, LocalRows&) {
             found = ask(scheduler, asked);
           });
         })) {
      CHECK(message_of(one).empty());
    }
    std::size_t same = 0;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      REQUIRE(found[i].outcome.has_value());
      CHECK(found[i].outcome->error.empty());
      same += found[i].tokens == expected[i].tokens ? 1 : 0;
      if (i % 2 == 1) CHECK(found[i].outcome->cached_tokens == 0);
    }
    CHECK(same >= asked.size() - 2);
  }
}

TEST_CASE("a rank that is gone ends the server, and so does one that is another") {
  const auto full = plan_named("full");
  const std::vector<Question> asked = questions({full});
  const auto thrown = test::run_ranks(3, [&](Communicator& them) {
    ParallelServed served{model(), *full, 1000, them};
    const SchedulerOptions wanted = options(std::size_t{64} << 20);
    LocalRows own{served, wanted, &them};
    if (them.rank() == 1) {
      // What a follower does, for a while.
      own.options().tell("follows");
      require_same(them, "options of the server", 1);
      return;
    }
    if (them.rank() > 0) return follow(them, own);
    RowsOverRanks rows{them, own, served.shards()};
    Scheduler scheduler{served, rows, wanted};
    static_cast<void>(ask(scheduler, asked));
  });
  for (const std::exception_ptr& one : thrown) {
    CHECK(message_of(one).find(
              "ranks do not have the same options of the server: rank 0 has another than rank 1") !=
          std::string::npos);
  }
  std::size_t steps = 0;
  const auto gone = test::run_ranks(3, [&](Communicator& them) {
    over_ranks(them, *full, options(std::size_t{64} << 20),
               [&](Scheduler& scheduler, RowsOverRanks&, LocalRows&) {
                 static_cast<void>(ask(scheduler, asked, [&] {
                   if (++steps == 5) throw ConfigError{"rank 0 had enough"};
                 }));
               });
  });
  CHECK(message_of(gone[0]) == "rank 0 had enough");
  CHECK(message_of(gone[1]) == "a rank is gone");
  CHECK(message_of(gone[2]) == "a rank is gone");
  // The scheduler's own rank meets a missing one.
  std::string said;
  const auto missing = test::run_ranks(2, [&](Communicator& them) {
    ParallelServed served{model(), *full, 1000, them};
    const SchedulerOptions wanted = options(std::size_t{64} << 20);
    LocalRows own{served, wanted, &them};
    if (them.rank() == 1) {
      try {
        SchedulerOptions other = wanted;
        RowsOverRanks same_handshake{them, own, served.shards()};
      } catch (const Error&) {
      }
      throw ConfigError{"rank 1 dies"};
    }
    RowsOverRanks rows{them, own, served.shards()};
    try {
      Scheduler scheduler{served, rows, wanted};
      static_cast<void>(ask(scheduler, asked));
    } catch (const reference::CommunicationError& error) {
      said = error.what();
    }
  });
  CHECK(said == "a rank is gone");
  CHECK(message_of(missing[1]) == "rank 1 dies");
}

TEST_CASE("more ranks than heads, and plans that ranks do not serve, are refused") {
  const auto full = plan_named("full");
  for (const std::exception_ptr& one :
       test::run_ranks(17, [&](Communicator& them) { ParallelServed served{model(), *full, 1000, them}; })) {
    CHECK(message_of(one).find("would hold none of the model's 16 KV heads") != std::string::npos);
  }
  const auto thrown = test::run_ranks(2, [&](Communicator& them) {
    const ParallelServed served{model(), *full, 1000, them};
    Plan shared = *plan_named("adakv:64");
    CHECK_THROWS_AS(served.fit(shared), ConfigError);
  });
  for (const std::exception_ptr& one : thrown) CHECK(message_of(one).empty());
}
