// SPDX-License-Identifier: Apache-2.0
#include <evaluate/evaluation.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <common/asked_question.hpp>
#include <common/files.hpp>
#include <common/sequence.hpp>
#include <evaluate/evaluation_table.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

SuiteConfig small() {
  SuiteConfig config;
  config.length = 512;
  config.questions = 3;
  config.per_text = 2;
  config.depths = 2;
  config.windows = 2;
  config.scored = 20;
  return config;
}

std::vector<Entry> entries(const TextModel& model, const std::vector<std::string>& plans) {
  std::vector<Entry> made;
  for (const std::string& plan : plans) {
    made.push_back({plan, 0, make_exam_plan(plan, model.config().shape(), "")});
  }
  return made;
}

std::vector<nlohmann::ordered_json> as_jsons(const std::vector<Point>& points) {
  std::vector<nlohmann::ordered_json> jsons;
  for (const Point& point : points) jsons.push_back(as_json(point));
  return jsons;
}

}  // namespace

TEST_CASE("suites draw as many tasks as requested, the same ones each time") {
  const auto model = random_text_model();
  const std::string plain = evaluation_text();
  SuiteConfig config = small();
  config.length = 1024;
  for (const Suite suite :
       {Suite::passkey, Suite::keys, Suite::reasoning, Suite::perplexity, Suite::agreement}) {
    CAPTURE(name_of(suite));
    const auto tasks = draw_tasks(model, suite, config, 5, plain);
    const auto again = draw_tasks(model, suite, config, 5, plain);
    const auto others = draw_tasks(model, suite, config, 6, plain);
    std::size_t questions = 0;
    std::size_t windows = 0;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      CHECK(tasks[i].text.body == again[i].text.body);
      CHECK(tasks[i].text.body != others[i].text.body);
      questions += tasks[i].text.questions.size();
      if (tasks[i].follows.empty()) continue;
      ++windows;
      CHECK(tasks[i].follows.size() == 20);
      CHECK(plain.find(tasks[i].text.body + model.decode(tasks[i].follows)) != std::string::npos);
      CHECK(tasks[i].text.body.size() == 1004);
    }
    // A grid is rounded up to whole texts.
    CHECK(questions == (suite == Suite::perplexity ? 0 : suite == Suite::passkey ? 4 : 3));
    CHECK(windows == (asks(suite) ? 0 : 2));
  }
}

TEST_CASE("surprise and divergence are those of the bytes that follow") {
  const auto model = random_text_model();
  const SuiteConfig config = small();
  const auto tasks = draw_tasks(model, Suite::perplexity, config, 1, evaluation_text());
  const auto made = entries(model, {"full", "sink_recent:4,16"});
  const std::array<const ExamPlan*, 2> plans{&made[0].plan, &made[1].plan};
  const auto outcomes = perform(model, tasks[0], plans, config, true);
  REQUIRE(outcomes.size() == 2);
  CHECK(outcomes[0].measures.at("text_kl") == std::vector<double>{0});
  CHECK(outcomes[0].measures.at("text_same") == std::vector<double>{1});
  CHECK(outcomes[1].measures.at("text_kl")[0] > 0);
  CHECK(outcomes[1].measures.at("text_same")[0] < 1);

  // Byte by byte over a cache of its own, with explicit probabilities.
  double apart = 0;
  std::array<double, 2> nats{};
  const auto probabilities = [](const std::vector<float>& logits) {
    std::vector<double> shares;
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    for (const float logit : logits) shares.push_back(std::exp(static_cast<double>(logit)) / sum);
    return shares;
  };
  const auto full = make_sequence(model.llama(), made[0].plan.plan);
  const auto window = make_sequence(model.llama(), made[1].plan.plan);
  std::vector<float> of_full = full->prefill(bytes_of(tasks[0].text.body));
  std::vector<float> of_window = window->prefill(bytes_of(tasks[0].text.body));
  for (const int next : tasks[0].follows) {
    const auto p = probabilities(of_full);
    const auto q = probabilities(of_window);
    nats[0] -= std::log(p[static_cast<std::size_t>(next)]);
    nats[1] -= std::log(q[static_cast<std::size_t>(next)]);
    for (std::size_t i = 0; i < p.size(); ++i) apart += p[i] * std::log(p[i] / q[i]);
    of_full = full->decode(next);
    of_window = window->decode(next);
  }
  // Here the caches read the last byte of the text together with the rest, so rows differ in rounding.
  CHECK(outcomes[0].measures.at("nats")[0] == doctest::Approx(nats[0] / 20).epsilon(1e-3));
  CHECK(outcomes[1].measures.at("nats")[0] == doctest::Approx(nats[1] / 20).epsilon(1e-3));
  CHECK(outcomes[1].measures.at("text_kl")[0] == doctest::Approx(apart / 20).epsilon(1e-2));
}

TEST_CASE("answers are those of greedy decoding, and the byte count is that at their start") {
  const auto model = random_text_model();
  const SuiteConfig config = small();
  auto tasks = draw_tasks(model, Suite::keys, config, 1, evaluation_text());
  const auto made = entries(model, {"full", "sink_recent:4,16", "int4:32", "quest:16,64"});
  for (const Entry& entry : made) {
    CAPTURE(entry.plan.name);
    // The right answers of these questions are those of the plan, except for the second.
    const std::vector<int> body = bytes_of(tasks[0].text.body);
    std::vector<std::string> answers;
    for (Question& question : tasks[0].text.questions) {
      const auto cache = make_sequence(model.llama(), entry.plan.plan);
      static_cast<void>(cache->prefill(std::span{body}.first(body.size() - read_by_forks)));
      static_cast<void>(cache->prefill(std::span{body}.last(read_by_forks)));
      std::vector<float> logits = cache->prefill(bytes_of(question.text));
      std::string answer;
      for (std::size_t i = 0; i < 27; ++i) {
        const auto likeliest = std::ranges::max_element(logits) - logits.begin();
        answer += static_cast<char>(likeliest);
        logits = cache->decode(static_cast<int>(likeliest), entry.plan.reading);
      }
      answers.push_back(std::move(answer));
    }
    tasks[0].text.questions[0].answer = answers[0];
    tasks[0].text.questions[0].other = answers[1];
    tasks[0].text.questions[1].answer = std::string(27, '?');
    const std::array<const ExamPlan*, 1> plan{&entry.plan};
    SuiteConfig own = config;
    own.prefill = Prefill::own;
    tasks[0].text.questions[1].other.clear();
    CHECK(perform(model, tasks[0], plan, own, false)[0].marks == "10");
    tasks[0].text.questions[1].other = answers[1];
    CHECK(perform(model, tasks[0], plan, own, false)[0].marks == "1o");
  }
  const std::array<const ExamPlan*, 2> plans{&made[0].plan, &made[1].plan};
  const auto outcomes = perform(model, tasks[0], plans, config, false);
  const std::size_t rows = 512 - 27;
  CHECK(outcomes[0].head_bytes[0] == std::vector<double>(4, 256.0 * rows));
  CHECK(outcomes[1].head_bytes[0][0] < 256.0 * 21);
  CHECK(outcomes[0].kv_bytes[0] >= 4 * 256.0 * rows);
}

TEST_CASE("results depend neither on threads nor on which plans are measured together") {
  const auto model = random_text_model();
  const SuiteConfig config = small();
  const std::string plain = evaluation_text();
  const std::vector<std::string> names{"full", "sink_recent:4,16", "int4:32", "quest:16,64"};
  const auto settings = settings_of(config, "a/model");
  const auto path = (std::filesystem::temp_directory_path() / "kvpolicy_evaluation.json").string();
  for (const Suite suite : {Suite::keys, Suite::agreement}) {
    CAPTURE(name_of(suite));
    set_threads(1);
    const auto one = as_jsons(measure(model, suite, config, {1, 2}, entries(model, names), plain));
    set_threads(3);
    const auto three = as_jsons(measure(model, suite, config, {1, 2}, entries(model, names), plain));
    CHECK(file_of("c", settings, one) == file_of("c", settings, three));
    // Continued: one plan comes from a file, the others are measured now.
    const auto first = as_jsons(measure(model, suite, config, {1, 2}, entries(model, {names[2]}), plain));
    write_result(path, file_of("c", settings, first));
    auto known = points_of(path, settings);
    CHECK(known == first);
    const auto rest =
        measure(model, suite, config, {1, 2}, entries(model, {names[0], names[1], names[3]}), plain);
    for (const Point& point : rest) known.push_back(as_json(point));
    std::vector<nlohmann::ordered_json> ordered;
    for (const std::uint64_t seed : {1U, 2U}) {
      for (const std::string& name : names) {
        Point wanted{.suite = suite,
                     .length = 512,
                     .seed = seed,
                     .plan = name,
                     .method = name,
                     .settings = make_exam_plan(name, model.config().shape(), "").settings,
                     .outcome = {}};
        const auto* found = find_point(known, wanted);
        REQUIRE(found != nullptr);
        // The settings that a name stood for are part of the measurement.
        wanted.settings["kernel"] = 5;
        CHECK(find_point(known, wanted) == nullptr);
        ordered.push_back(*found);
      }
    }
    CHECK(file_of("c", settings, ordered) == file_of("c", settings, one));
  }
  CHECK_THROWS_AS(static_cast<void>(points_of(path, settings_of(config, "another"))), ConfigError);
  write_result(path, "[1, 2]\n");
  CHECK_THROWS_AS(static_cast<void>(points_of(path, settings)), FormatError);
  write_result(path, "{\"points\": ");
  CHECK_THROWS_AS(static_cast<void>(points_of(path, settings)), FormatError);
  std::filesystem::remove(path);
  CHECK(points_of(path, settings).empty());
}

TEST_CASE("plans that drop rows do so after the question, or after the text") {
  const auto model = random_text_model();
  SuiteConfig config = small();
  const auto tasks = draw_tasks(model, Suite::keys, config, 1, evaluation_text());
  ExamPlan plan{.name = "budget",
                .plan = HeadPlan<bfloat16>{model.config().shape(),
                                           HeadBudgetCache<DenseStorage<bfloat16>>::Config{.budget = 24}},
                .compresses = true};
  CHECK(reads_prompt_in_full(plan.plan));
  const std::array<const ExamPlan*, 1> plans{&plan};
  const auto shared = perform(model, tasks[0], plans, config, true);
  CHECK(shared[0].head_bytes[0] == std::vector<double>(4, 256.0 * (24 + 8)));
  config.prefill = Prefill::own;
  const auto own = perform(model, tasks[0], plans, config, true);
  CHECK(own[0].measures == shared[0].measures);
  CHECK(own[0].head_bytes == shared[0].head_bytes);
  plan.compress = Compress::after_text;
  const auto before = perform(model, tasks[0], plans, config, true);
  CHECK(before[0].head_bytes[0] == std::vector<double>(4, 256.0 * (24 + 8 + 28)));
  CHECK(before[0].measures != own[0].measures);
}

TEST_CASE("tables have a row for each plan, means and spreads over seeds") {
  Point point{.suite = Suite::reasoning,
              .length = 1024,
              .seed = 1,
              .plan = "h2o:256",
              .method = "h2o",
              .share = 0.25,
              .settings = {{"capacity", 256}},
              .outcome = {}};
  point.outcome.marks = "1o00";
  point.outcome.kv_bytes = {3e6};
  point.outcome.head_bytes = {{1e6, 1e6}};
  std::vector<nlohmann::ordered_json> points{as_json(point)};
  point.seed = 2;
  point.outcome.marks = "1100";
  points.push_back(as_json(point));
  const std::string table = evaluation_tables(points);
  CHECK(table.find("| h2o at 25 % | 37.5 ± 17.7 | 2.00 MB | 3.00 MB |") != std::string::npos);
  CHECK(table.find("Settings:\n\n- `h2o:256`: capacity 256\n") != std::string::npos);
  CHECK(table.find("| h2o at 25 % | 50.0 ± 0.0 | 2.00 MB | 3.00 MB |") != std::string::npos);
  CHECK(table.find("footprint") == std::string::npos);  // older files have none
  // The footprint is the mean over the questions of a point, and over the points of the greatest length.
  point.outcome.kv_footprint = {0.25, 0.5};
  points[1] = as_json(point);
  CHECK(points[1]["kv_footprint"] == 0.375);
  point.seed = 3;
  point.outcome.kv_footprint = {0.125};
  points.push_back(as_json(point));
  point.plan = point.method = "full";
  point.share = 0;
  point.outcome.kv_footprint = {};
  points.push_back(as_json(point));
  const std::string longer = evaluation_tables(points);
  CHECK(longer.find("| KV cache | KV footprint, % |") != std::string::npos);
  CHECK(longer.find(" | 2.00 MB | 3.00 MB | 25.0 |") != std::string::npos);
  CHECK(longer.find("| full | 50.0 | 2.00 MB | 3.00 MB | - |") != std::string::npos);
}
