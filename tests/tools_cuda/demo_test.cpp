// SPDX-License-Identifier: Apache-2.0
//
// The demo on a device: the shipped model reads a text there and answers questions, under each plan of the demo, as it does
// on the CPU. A device gets the demo's own text and its 12 questions, the emulation shorter ones.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <string>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/model_shape.hpp>

#include "common/asked_question.hpp"
#include "common/cuda_sequence.hpp"
#include "common/exam.hpp"
#include "common/exam_plan.hpp"
#include "common/retrieval_text.hpp"
#include "common/text_model.hpp"
#include "common/texts.hpp"
#include "support/source_dir.hpp"

namespace kvpolicy::tools::demo_test {
namespace {

#ifdef KVPOLICY_TESTS_ON_DEVICE
constexpr std::size_t length = 8192;
constexpr std::size_t questions = 12;
#else
constexpr std::size_t length = 400;
constexpr std::size_t questions = 2;
#endif

TEST_CASE("the shipped model reads and answers on a device as on the CPU, under each plan of the demo") {
  const std::string folder = testing::source_dir() + "/reference_model/weights/keyfinder";
  const TextModel model = TextModel::load(folder);
  const Device device = open_cuda_device(model.llama());
  const RetrievalText text =
      draw_text_in_tokens(model, part_of(text_named("kjv"), Split::test), length,
                          {.questions = questions, .kind = FactKind::keys, .lead_in = true, .seed = 1});
  REQUIRE(text.questions.size() == questions);
  for (const std::string& name : plans_of_bytes) {
    if (name == "triforce") continue;  // the tools decode its tokens on the CPU
    CAPTURE(name);
    const ExamPlan plan = make_exam_plan(name, model.config().shape(), folder);
    const ExamResult host = examine(model, plan, {&text, 1});
    const ExamResult there = examine(model, plan, {&text, 1}, {}, Threads::one_text, device.make_sequence);
    CHECK(there.right == host.right);
    CHECK(agreement(there, host) == 1.0);
    CHECK(there.answers == host.answers);
    // A device holds whole pages of rows, of a quantised head two kinds, and quantises the last rows in blocks.
    const ModelShape shape = model.config().shape();
    const std::size_t page_bytes = 64 * 2 * shape.head_dim * sizeof(bfloat16);
    const auto pages = static_cast<double>(shape.layers * shape.kv_heads * page_bytes);
    const bool quantised = name.ends_with("int4");
    CHECK(std::abs(there.bytes - host.bytes) <= (quantised ? 2 : 1) * pages);
    CHECK(std::abs(there.bytes_read - host.bytes_read) <= (quantised ? pages : 0));
    if (name == "full") CHECK(there.right_count() == questions);
  }
}

}  // namespace
}  // namespace kvpolicy::tools::demo_test
