// SPDX-License-Identifier: Apache-2.0
#include <common/exam.hpp>
#include <common/exam_plan.hpp>
#include <common/files.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/llama.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::vector<RetrievalText> texts(std::size_t count) {
  std::vector<RetrievalText> drawn;
  for (std::size_t i = 0; i < count; ++i) {
    drawn.push_back(draw_text(held_out_text(), {.length = 512, .questions = 2, .number = i}));
  }
  return drawn;
}

}  // namespace

TEST_CASE("questions about one text do not affect each other") {
  const auto model = random_text_model();
  const ExamPlan plan = make_exam_plan("full", model.config().shape(), "");
  std::vector<RetrievalText> both = texts(1);
  const ExamResult together = examine(model, plan, both);
  REQUIRE(together.answers.size() == 2);
  CHECK(together.answers[0].size() == 27);
  both[0].questions.erase(both[0].questions.begin());
  CHECK(examine(model, plan, both).answers[0] == together.answers[1]);
}

TEST_CASE("threads can share the texts") {
  const auto model = random_text_model();
  const ExamPlan plan = make_exam_plan("sink_recent:16,64", model.config().shape(), "");
  const auto drawn = texts(3);
  std::size_t reported = 0;
  const auto report = [&](std::size_t done, std::size_t total) {
    CHECK(done <= total);
    reported = done == total ? total : reported;
  };
  const ExamResult one = examine(model, plan, drawn);
  const ExamResult many = examine(model, plan, drawn, report, Threads::texts);
  CHECK(reported > 3 * 400);
  CHECK(one.answers == many.answers);
  CHECK(one.right == many.right);
  CHECK(one.bytes == many.bytes);
  CHECK(agreement(one, many) == 1.0);
}

TEST_CASE("a plan that reads everything answers like the full plan") {
  const auto model = random_text_model();
  const ModelShape shape = model.config().shape();
  const auto drawn = texts(2);
  const ExamResult full = examine(model, make_exam_plan("full", shape, ""), drawn);
  for (const char* name : {"quest:16,1024", "chunk:16,1024", "sink_recent:16,1000"}) {
    CAPTURE(name);
    CHECK(agreement(examine(model, make_exam_plan(name, shape, ""), drawn), full) == 1.0);
  }
  const ExamResult window = examine(model, make_exam_plan("sink_recent:4,8", shape, ""), drawn);
  CHECK(agreement(window, full) < 1.0);
  CHECK(window.bytes < full.bytes);
  CHECK(window.bytes_read < full.bytes_read / 10);
}

TEST_CASE("the bytes read are those of the rows that are shown") {
  const auto model = random_text_model();
  const ModelShape shape = model.config().shape();
  const auto drawn = texts(1);
  const std::size_t rows = 512 - 1;  // the last byte of the answer is not fed back
  const std::size_t row = 2 * 64 * sizeof(bfloat16);
  const auto read = [&](const char* name) {
    return examine(model, make_exam_plan(name, shape, ""), drawn).bytes_read;
  };
  CHECK(read("full") == static_cast<double>(4 * rows * row));
  CHECK(read("sink_recent:16,64") == doctest::Approx(4.0 * 79 * static_cast<double>(row)).epsilon(0.02));
  CHECK(read("quest:16,64") < read("full") / 2);
  CHECK(read("int4:32") < read("full") / 2);
  // A quarter of the keys' bits, which are two thirds of all, and then the rows that matter, or all of them.
  CHECK(read("bounded:1,residual=16") < read("bounded:0.5,residual=16"));
  CHECK(read("bounded:0.5,residual=16") <= read("bounded:0,residual=16") * 1.5);
  CHECK(read("bounded:1,residual=16") < read("full") / 2);
}

TEST_CASE("plans describe themselves") {
  const ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  HeadPlan<bfloat16> plan = make_exam_plan("full", shape, "").plan;
  CHECK(describe(plan) == "every row");
  plan.set(0, 0, SinkRecentCache<DenseStorage<bfloat16>>::Config{.sinks = 4, .recent = 32});
  CHECK(describe(plan) == "1 head: every row; 1 head: the first 4 rows and the latest 32");
  CHECK(kinds_of(plan)(0, 0) == HeadKind::streaming);
  CHECK(kinds_of(plan)(0, 1) == HeadKind::retrieval);
  CHECK(describe(make_exam_plan("int4", shape, "").plan) ==
        "every row in 4 bits but for the first 4 and the latest 128, keys per channel in groups of 64, "
        "values in groups of 64, rotated");
}

TEST_CASE("gates and scores can come from elsewhere, and can be quantised") {
  const ModelShape shape{.layers = 4, .q_heads = 8, .kv_heads = 4, .head_dim = 64};
  const std::string weights = repository_path(shipped_model);
  const auto plan = [&](const std::string& name) { return make_exam_plan(name, shape, weights).plan; };
  CHECK(plan("duo@" + weights + "/duo:0.75") == plan("duo:0.75"));
  CHECK(plan("duo@" + weights + "/duo+int4:0.75") == plan("duo+int4:0.75"));
  CHECK(plan("duo@" + weights + "/duo") == plan("duo"));
  CHECK(plan("headkv@" + weights + "/headkv/retrieval_heads.json:64") == plan("headkv:64"));
  CHECK(plan("headkv@" + weights + "/headkv/retrieval_heads.json+int4:64,16") == plan("headkv+int4:64,16"));
  CHECK(plan("duo:0.75") != plan("duo:0.5"));
  CHECK_THROWS(static_cast<void>(plan("duo@no/such:0.5")));
  CHECK_THROWS_AS(static_cast<void>(plan("duo@" + weights + "/duo:x")), ConfigError);
}
