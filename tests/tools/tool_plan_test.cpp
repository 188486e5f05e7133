// SPDX-License-Identifier: Apache-2.0
//
// The names that --plan accepts, and their settings.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include <common/exam_plan.hpp>
#include <common/files.hpp>
#include <generate/plan_view.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "support/temporary_folder.hpp"
#include "tool_plan.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Plan = HeadPlan<float>;
using Dense = DenseStorage<float>;
constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

Plan plan_named(const std::string& name) {
  PlanArguments arguments;
  arguments.plan = name;
  return make_plan<float>(arguments, shape);
}

std::string refusal(const std::string& name) {
  try {
    (void)plan_named(name);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("--plan bounded: the format, and how it is read") {
  using Bounded = QuantizedResidualCache<float, Granularity::per_channel>;
  const auto format = plan_named("bounded:0.1").at(0, 0).get<Bounded>();
  CHECK(plan_named("bounded:0.1") == Plan{shape, LowBitFormat::of_bounded(shape).head<float>()});
  CHECK(format.storage.halves);
  CHECK(format.storage.key_encoding() == Encoding::uint4x2);
  CHECK(format.storage.value_encoding() == Encoding::uint4);
  CHECK_FALSE(format.storage.key_hadamard);
  CHECK(plan_named("bounded+int8").at(0, 0).get<Bounded>().storage.value_encoding() == Encoding::uint4x2);
  CHECK(plan_named("bounded:0.1,residual=32,sinks=0,key_group=16").at(1, 1).get<Bounded>().storage.residual ==
        32);
  const auto reading = [](const std::string& name) { return reading_of(name, needs_of(plan_named(name))); };
  CHECK(reading("bounded") == Reading{.read = Read::bounded, .epsilon = 0.05F});
  CHECK(reading("bounded:0.2,certainty=none") ==
        Reading{.read = Read::bounded, .epsilon = 0.2F, .certainty = Certainty::none});
  CHECK(reading("quest:16,64") == Reading{.read = Read::selected, .refresh_each_step = true});
  CHECK(reading("int8:halves=yes") == Reading{});
  CHECK(refusal("bounded:1.5").find("epsilon is 1.5, must be a share of the attention, 0 to 1") !=
        std::string::npos);
  CHECK(refusal("bounded+int4:0.1").find("int4 is not int8, or keys of 8 bits such as k8v4") !=
        std::string::npos);
  CHECK(refusal("bounded:0.1,certainty=maybe").find("must be one of sure, four_sigma, none") !=
        std::string::npos);
  CHECK_THROWS_WITH_AS(require_no_bound("bounded:0.1", "serve"),
                       "--plan bounded:0.1: is read with a bound, which serve does not do; generate, "
                       "compare, evaluate and visualize do",
                       ConfigError);
}

TEST_CASE("--plan bounded@FILE: a plan file whose heads in halves are read with a bound") {
  const testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "mixed.json").string();
  Plan mixed{shape, FullCache<Dense>::Config{}};
  mixed.set(1, 0, LowBitFormat::of_bounded(shape).head<float>());
  io::save_plan(file, mixed);
  const std::string name = "bounded@" + file + ":0.2,certainty=four_sigma";
  CHECK(plan_named(name) == mixed);
  CHECK(reading_of(name, needs_of(mixed)) ==
        Reading{.read = Read::bounded, .epsilon = 0.2F, .certainty = Certainty::four_sigma});
  CHECK(refusal("bounded@" + file + ":0.2,residual=32").find("residual") != std::string::npos);
  CHECK(refusal("bounded+int8@" + file + ":0.2").find("int8") != std::string::npos);
  CHECK(refusal("bounded@" + (folder.path() / "none.json").string()).find("none.json") != std::string::npos);
  io::save_plan(file, Plan{shape, FullCache<Dense>::Config{}});
  CHECK(refusal("bounded@" + file).find("no head has its keys in halves") != std::string::npos);
  io::save_plan(file, Plan{{1, 4, 2, 64}, LowBitFormat::of_bounded(shape).head<float>()});
  CHECK(refusal("bounded@" + file).find("is a plan for") != std::string::npos);
}

TEST_CASE("--plan: a number of rows per head, ranked by the scorer that the name states") {
  const auto same = [](const std::string& name, const HeadSettings<float>& settings) {
    return plan_named(name) == Plan{shape, settings};
  };
  CHECK(same("snapkv:100", HeadBudgetCache<Dense>::Config{.budget = 92}));
  CHECK(same("snapkv:100,20",
             HeadBudgetCache<Dense>::Config{.budget = 80, .scorer = {.observation_window = 20}}));
  CHECK(same("snapkv:8", HeadBudgetCache<Dense>::Config{.budget = 0}));
  CHECK(same("adakv:64", HeadBudgetCache<Dense>::Config{.budget = 56, .adaptive_in_layer = true}));
  CHECK(same("tova:64", HeadBudgetCache<Dense, TovaScorer>::Config{
                            .budget = 64, .compress_every = 1, .after_first_compress = true}));
  CHECK(same("h2o:65",
             HeadBudgetCache<Dense, H2oScorer>::Config{
                 .budget = 33, .compress_every = 1, .after_first_compress = true, .scorer = {.recent = 32}}));
  CHECK(same("keynorm:64", HeadBudgetCache<Dense, KeyNormScorer>::Config{.budget = 64}));
  CHECK(same("keydiff:64", HeadBudgetCache<Dense, KeyDiffScorer>::Config{.budget = 64}));
  CHECK(same("keydiff:64,compete=layer",
             HeadBudgetCache<Dense, KeyDiffScorer>::Config{.budget = 64, .adaptive_in_layer = true}));
  CHECK(same("kvzip:64", HeadBudgetCache<Dense, KvZipScorer>::Config{
                             .budget = 64, .adaptive_in_model = true, .safeguard = 0}));
  CHECK(same("kvzip:64,compete=head", HeadBudgetCache<Dense, KvZipScorer>::Config{.budget = 64}));
  CHECK(same("snapkv:64,compete=model",
             HeadBudgetCache<Dense>::Config{.budget = 56, .adaptive_in_model = true, .safeguard = 0}));
  HeadBudgetCache<Dense>::Config critical{
      .budget = 56, .weigh_values = true, .value_norm = ValueNorm::output_l1, .unweighed_share = 0.5};
  CHECK(same("criticalkv:64", critical));
  CHECK(same("snapkv:64,weigh_values=true,value_norm=output_l1,unweighed_share=0.5", critical));
  CHECK(same("criticalkv:64,weigh_values=false", HeadBudgetCache<Dense>::Config{.budget = 56}));
  critical.scorer.votes = Votes::largest;
  critical.scorer.prior_share = 1;
  CHECK(same("criticalkv:64,votes=largest,prior_share=1", critical));
  critical.adaptive_in_layer = true;
  CHECK(same("criticalkv:64,votes=largest,prior_share=1,compete=layer", critical));
  // Settings of what the name does not ask for are unknown, not ignored.
  CHECK(refusal("snapkv:64,value_norm=output_l1").find("no setting 'value_norm'") != std::string::npos);
  CHECK(refusal("snapkv:64,prior_share=1").find("no setting 'prior_share'") != std::string::npos);
  CHECK(refusal("criticalkv:64,value_norm=l1").find("must be one of value_l2, output_l1") !=
        std::string::npos);
  const auto quantized = plan_named("adakv+int4:64");
  using Codes = HeadBudgetCache<PerTokenStorage<float>>;
  CHECK(quantized.at(1, 1).get<Codes>().storage.bits == 4);
  CHECK(quantized.at(1, 1).get<Codes>().adaptive_in_layer);
  CHECK(refusal("snapkv:7").find("a capacity of 7 rows, must be at least 1 and at least the 8 latest") !=
        std::string::npos);
  CHECK(refusal("tova:0").find("a capacity of 0 rows") != std::string::npos);
  CHECK(refusal("tova+int4:9").find("tova cannot be combined with int4") != std::string::npos);
  CHECK(refusal("h2o:9,3").find("takes at most 1 numbers") != std::string::npos);
  CHECK(needs_of(plan_named("h2o:9")).compress);
}

TEST_CASE("--plan: rows on average, divided by the shares in a file") {
  const testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "kept.json").string();
  io::save_head_scores(file, HeadScores{2, 2, {0.125, 0.25, 0.5, 1.0}});
  using Different = HeadBudgetCache<Dense, KeyDiffScorer>;
  const auto budgets = [&](const std::string& rest) {
    const Plan plan = plan_named("keydiff@" + file + rest);
    std::vector<std::size_t> found;
    plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<float>& head) {
      const auto own = head.get<Different>();
      CHECK(own == Different::Config{.budget = own.budget});
      found.push_back(own.budget);
    });
    return found;
  };
  using Rows = std::vector<std::size_t>;
  CHECK(budgets(":15") == Rows{4, 8, 16, 32});  // a context of 4,096
  CHECK(budgets(":15,18") == Rows{8, 16, 18, 18});
  CHECK(plan_named("keynorm@" + file + ":15").at(1, 1) ==
        HeadSettings<float>{HeadBudgetCache<Dense, KeyNormScorer>::Config{.budget = 32}});
  CHECK(refusal("keydiff@" + file + ":19,18").find("capacity is 19, must be 1 to most_rows = 18") !=
        std::string::npos);
  CHECK(refusal("keydiff@" + file + ":15,compete=model").find("no setting 'compete'") != std::string::npos);
  for (const std::string name : {"h2o", "full", "int4", "quest"}) {
    CHECK(refusal(name + "@" + file).find(name + " takes no file") != std::string::npos);
  }
  io::save_head_scores(file, HeadScores{1, 2, {0.5, 1.0}});
  CHECK(refusal("keydiff@" + file + ":15").find(file) != std::string::npos);
  io::save_head_scores(file, HeadScores{2, 2, {0.5, 1.0, 2.0, 0.1}});
  CHECK(refusal("keydiff@" + file + ":15").find("the share of layer 1, head 0 is 2, must be 0 to 1") !=
        std::string::npos);
}

TEST_CASE("a pattern's view says how many heads tie at the cut") {
  const testing::TemporaryFolder folder;
  const std::string pattern = folder.path() / "pattern";
  io::save_duo_pattern(pattern, {HeadGates{3, 2, {0.2, 1.0, 1.3, 1.0, 1.0, 0.5}}, 1, 2});
  const auto text = [&](const std::string& rest) {
    PlanArguments arguments;
    arguments.plan = "duo@" + pattern + rest;
    io::OrderedJson settings;
    (void)make_plan<float>(arguments, {.layers = 3, .q_heads = 2, .kv_heads = 2, .head_dim = 64}, {},
                           &settings);
    return tie_text(settings);
  };
  CHECK(text(":0.5").starts_with("the cut falls into a tie of 4 heads, 3 of which keep"));
  CHECK(text(":0.33333").empty());  // all four
  CHECK(text(":0.16667").empty());
  CHECK(text(":0").empty());
  CHECK(text(":0.5,rule=threshold").empty());
}

TEST_CASE("--plan: a name is one plan, in every tool, with the published settings") {
  const ModelShape own{.layers = 4, .q_heads = 8, .kv_heads = 4, .head_dim = 64};
  const std::string weights = repository_path(shipped_model);
  for (const std::string name : {"headkv:128", "snapkv:128", "adakv:64", "pyramid:64", "headkv+int4:32",
                                 "duo:0.5", "kivi2", "headkv:128,kernel=29,beta=2"}) {
    CAPTURE(name);
    PlanArguments arguments;
    arguments.plan = name;
    io::OrderedJson settings;
    const auto plan = make_plan<bfloat16>(arguments, own, weights, &settings);
    const ExamPlan exam = make_exam_plan(name, own, weights);
    CHECK(exam.plan == plan);
    CHECK(exam.settings == settings);
  }
  using Budget = HeadBudgetCache<DenseStorage<bfloat16>>;
  const ExamPlan published = make_exam_plan("headkv:128", own, weights);
  const auto scorer = published.plan.at(1, 0).get<Budget>().scorer;
  CHECK(scorer.kernel == 7);
  CHECK(scorer.observation_window == 8);
  CHECK(
      published.settings.dump() ==
      R"({"capacity":128,"window":8,"beta":1.005,"score_power":1.0,"keep_short_prompts":true,"pooling":"max","kernel":7})");
  const ExamPlan tuned = make_exam_plan("headkv:128,kernel=29,beta=2,pooling=average", own, weights);
  CHECK(tuned.plan.at(1, 0).get<Budget>().scorer ==
        SnapKvScorer::Config{.observation_window = 8, .pooling = Pooling::average, .kernel = 29});
  // beta = 2 leaves a head with score 0 half of an equal share; 1.005 leaves it almost nothing.
  std::size_t least = 128;
  std::size_t least_published = 128;
  for (std::size_t i = 0; i < 16; ++i) {
    least = std::min(least, tuned.plan.at(i / 4, i % 4).get<Budget>().budget);
    least_published = std::min(least_published, published.plan.at(i / 4, i % 4).get<Budget>().budget);
  }
  CHECK(least >= 60);
  CHECK(least_published < 10);
  CHECK(describe(tuned).find("kernel 29") != std::string::npos);
  CHECK(describe(published).find("beta 1.005") != std::string::npos);
  const ExamPlan fastgen = make_exam_plan("fastgen:0.9,sinks=16", own, weights);
  CHECK(fastgen.fastgen->sinks == 16);
  CHECK(fastgen.fastgen->observation_window == FastGenConfig{}.observation_window);
  CHECK(fastgen.settings["recovery"] == 0.9);
}

TEST_CASE("--plan: the name can contain settings of storages, windows and rules") {
  using ByChannel = QuantizedResidualCache<float, Granularity::per_channel>;
  const auto kivi = [](const std::string& name) {
    return plan_named(name).at(0, 0).get<ByChannel>().storage;
  };
  CHECK(kivi("kivi2").flush == Flush::kivi);
  CHECK(kivi("kivi2:32,flush=steady").flush == Flush::steady);
  CHECK(kivi("kivi2:32,flush=steady").residual == 32);
  CHECK(kivi("kivi4:64,group=64").key_group == 64);
  const auto int4 = plan_named("int4:128,group=32,key_group=16,sinks=9").at(0, 0).get<ByChannel>();
  CHECK(int4.sinks == 9);
  CHECK(int4.storage.key_group == 16);
  CHECK(int4.storage.value_group == 32);
  CHECK(int4.storage.residual == 128);
  CHECK(int4.storage.key_hadamard);
  CHECK(int4.storage.value_hadamard);
  using ByRow = QuantizedResidualCache<float>;
  CHECK(plan_named("int4:128,keys=token,group=64,sinks=0") == plan_named("hf4"));
  CHECK(plan_named("hf2:32").at(0, 0).get<ByRow>().storage.residual == 32);
  CHECK(plan_named("int4:keys=token").at(0, 0).get<ByRow>().storage.key_group == 32);
  CHECK(plan_named("int8:keys=channel").at(0, 0).get<ByChannel>().storage.key_group == 64);
  const auto widths = plan_named("k5v3:7,hadamard=values").at(0, 0).get<ByChannel>().storage;
  CHECK(widths.key_encoding() == Encoding::uint5);
  CHECK(widths.value_encoding() == Encoding::uint3);
  CHECK_FALSE(widths.key_hadamard);
  CHECK(widths.value_hadamard);
  const auto survivors =
      plan_named("snapkv+k6v2:64,hadamard=both").at(0, 0).get<HeadBudgetCache<PerTokenStorage<float>>>();
  CHECK(survivors.storage.key_encoding() == Encoding::uint6);
  CHECK(survivors.storage.value_encoding() == Encoding::uint2);
  CHECK(survivors.storage.key_hadamard);
  const auto chunk = plan_named("sink_recent:4,8,mask=chunk").at(0, 0).get<SinkRecentCache<Dense>>();
  CHECK(chunk.mask == Mask::prefill_chunk);
  CHECK(plan_named("adakv:64,safeguard=0.5") != plan_named("adakv:64"));
  CHECK(plan_named("pyramid:64,beta=10") != plan_named("pyramid:64"));

  const ModelShape own{.layers = 4, .q_heads = 8, .kv_heads = 4, .head_dim = 64};
  const std::string gates = repository_path(shipped_model) + "/duo";
  const auto duo = [&](const std::string& rest) {
    PlanArguments arguments;
    arguments.plan = rest;
    return make_plan<float>(arguments, own);
  };
  CHECK(duo("duo+int4@" + gates + ":0.5") == duo("duo@" + gates + "+int4:0.5"));
  CHECK(duo("duo@" + gates + ":0.5,mask=chunk") != duo("duo@" + gates + ":0.5"));
  CHECK(duo("duo@" + gates + ":0.5,sinks=2,recent=3") != duo("duo@" + gates + ":0.5"));
  PlanArguments threshold;
  threshold.plan = "duo@" + gates + ":0.6";
  threshold.gate_cut = GateCut::threshold;
  CHECK(duo("duo@" + gates + ":0.6,rule=threshold") == make_plan<float>(threshold, own));
}

TEST_CASE("--plan: errors name the plan, the file and what would fit, and no C++ type") {
  const std::string weights = repository_path(shipped_model);
  CHECK(refusal("snapkv:64,kernel=8") ==
        "--plan snapkv:64,kernel=8: kernel is 8, must be odd and at most 1048576");
  CHECK(refusal("int4:128,group=7").starts_with("--plan int4:128,group=7: value_group is 7, must divide"));
  CHECK(refusal("int4:128,key_group=7")
            .starts_with("--plan int4:128,key_group=7: key_group is 7, must divide"));
  CHECK(refusal("int4:group=0").find("group is 0, must be at least 1") != std::string::npos);
  CHECK(refusal("int4:keys=token,key_group=8").find("key_group") != std::string::npos);
  CHECK(refusal("snapkv+k7v2:64") != "");
  CHECK(refusal("kivi2:33,flush=kivi").find("kivi's flush needs a residual") != std::string::npos);
  CHECK(refusal("duo:0.5").find("give the model, or the gates, as duo@FOLDER does") != std::string::npos);
  CHECK(refusal("duo@" + weights + "/duo:1.7").find("the sparsity is 1.7") != std::string::npos);
  CHECK(refusal("duo@" + weights + "/duo:-3").find("the sparsity is -3") != std::string::npos);
  const std::string scores = weights + "/headkv/retrieval_heads.json";
  const std::string unfit = refusal("headkv@" + scores + ":128");
  CHECK(unfit.starts_with("--plan headkv@" + scores + ":128: " + scores + ": scores for 4 layers"));
  const std::string small = refusal("headkv@" + scores + ":4");
  CHECK(small == "--plan headkv@" + scores + ":4: observation_window is 8, must be at most capacity = 4");
}
