// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/headkv.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/kivi.hpp>

#include "plan/random_plan.hpp"
#include "says.hpp"
#include "shared_data.hpp"
#include "support/source_dir.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

constexpr ModelShape shape{.layers = 3, .q_heads = 8, .kv_heads = 4, .head_dim = 64};

template <Element E = float>
std::string refusal(std::string_view text, const PolicyRegistry<E>& policies = shipped_policies<E>()) {
  try {
    (void)io::parse_plan<E>(text, "plan.json", policies);
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

// The text of a plan file for two heads in one layer, with these settings and heads.
std::string plan_text(std::string_view settings, std::string_view heads = "[[0, 0]]",
                      std::string_view more = "") {
  return message(R"({"format": "kvpolicy plan", "version": 1,
    "shape": {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64}, "settings": [)",
                 settings, R"(], "heads": )", heads, more, "}");
}

}  // namespace

TEST_CASE("every plan is read back unchanged, in every element type") {
  Random random{31};
  for (int round = 0; round < 200; ++round) {
    const auto plan = random_plan<HeadPlan<float>>(shape, random);
    const std::string text = io::format_plan(plan);
    REQUIRE(io::parse_plan(text) == plan);
    // The element type is not part of the file.
    REQUIRE(io::format_plan(io::parse_plan<float16>(text)) == text);
    REQUIRE(io::format_plan(io::parse_plan<bfloat16>(text)) == text);
  }
}

TEST_CASE("every setting of a head with a budget is read back, for every scorer") {
  using Dense = DenseStorage<float>;
  const HeadBudgetCache<Dense, H2oScorer>::Config h2o{
      .budget = 3, .compress_every = 1, .after_first_compress = true, .scorer = {.recent = 5}};
  const HeadBudgetCache<Dense, KeyNormScorer>::Config key_norm{.budget = 4, .scorer = {.recent = 6}};
  const HeadBudgetCache<Dense, TovaScorer>::Config tova{
      .budget = 7, .compress_from = 77, .compress_every = 2};
  const HeadBudgetCache<PerTokenStorage<float>>::Config shared{
      .adaptive_in_layer = true, .safeguard = 0.1, .scorer = {.observation_window = 3}};
  const HeadBudgetCache<Dense, KvZipScorer>::Config kvzip{
      .budget = 8, .adaptive_in_model = true, .safeguard = 0, .scorer = {.recent = 9}};
  const HeadBudgetCache<Dense, KeyDiffScorer>::Config key_diff{.budget = 8, .scorer = {.recent = 2}};
  const HeadBudgetCache<Dense>::Config worst_case{.scorer = {.votes = Votes::largest}};
  const HeadBudgetCache<Dense>::Config critical{.weigh_values = true,
                                                .value_norm = ValueNorm::output_l1,
                                                .unweighed_share = 0.5,
                                                .scorer = {.votes = Votes::largest, .prior_share = 0.25}};
  for (const HeadSettings<float>& own : {HeadSettings<float>{kvzip}, HeadSettings<float>{key_diff},
                                         HeadSettings<float>{worst_case}, HeadSettings<float>{critical}}) {
    const HeadPlan<float> alone{shape, own};
    CHECK(io::parse_plan(io::format_plan(alone)) == alone);
  }
  CHECK(io::format_plan(HeadPlan<float>{shape, kvzip}).find(R"("adaptive_in_model":true)") !=
        std::string::npos);
  CHECK(io::format_plan(HeadPlan<float>{shape, worst_case}).find(R"("votes":"largest")") !=
        std::string::npos);
  const std::string weighed = io::format_plan(HeadPlan<float>{shape, critical});
  for (const char* part :
       {R"("value_norm":"output_l1")", R"("unweighed_share":0.5)", R"("prior_share":0.25)"}) {
    CAPTURE(part);
    CHECK(weighed.find(part) != std::string::npos);
  }
  // What is as it always was is not written, so older versions read such files.
  const std::string usual = io::format_plan(HeadPlan<float>{shape, worst_case});
  for (const char* part : {"value_norm", "unweighed_share", "prior_share"}) {
    CHECK(usual.find(part) == std::string::npos);
  }
  HeadPlan<float> plan{shape, h2o};
  plan.set(0, 1, key_norm);
  plan.set(1, 0, tova);
  plan.set(1, 1, shared);
  const std::string text = io::format_plan(plan);
  CHECK(io::parse_plan(text) == plan);
  for (const char* part :
       {R"("scorer":"h2o")", R"("scorer":"key_norm")", R"("scorer":"tova")", R"("after_first_compress":true)",
        R"("compress_from":77)", R"("adaptive_in_layer":true)", R"("safeguard":0.1)"}) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
  // A setting of another scorer is unknown, and a flag must be true or false.
  std::string wrong = text;
  wrong.replace(wrong.find("\"recent\""), 8, "\"window\"");
  CHECK_THROWS_AS((void)io::parse_plan(wrong), FormatError);
  wrong = text;
  wrong.replace(wrong.find("\"adaptive_in_layer\":true"), 24, "\"adaptive_in_layer\":1");
  CHECK(refusal(wrong) == Says{"adaptive_in_layer: must be true or false, is 1"});
}

TEST_CASE("the quantised cache of transformers, as the page of its policy writes it") {
  const std::string page = io::read_text_file(source_dir() + "/docs/policies/quantized_residual.md");
  const std::size_t first = page.find("    {\"policy\": \"full\"");
  REQUIRE(first != std::string::npos);
  const std::string setting = page.substr(first, page.find("\n\n", first) - first);
  const HeadPlan<float16> plan = io::parse_plan<float16>(
      R"({"format": "kvpolicy plan", "version": 1, "heads": [[0]],
          "shape": {"layers": 1, "q_heads": 4, "kv_heads": 1, "head_dim": 128}, "settings": [)" +
      setting + "]}");
  CHECK(plan ==
        HeadPlan<float16>{plan.shape(),
                          QuantizedResidualCache<float16>::Config{
                              .storage = {.bits = 4, .key_group = 64, .value_group = 64, .residual = 128}}});
}

TEST_CASE("numbers are read back to the last bit, and sizes of more than 53 bits too") {
  using Window = SinkRecentCache<DenseStorage<float>>;
  Random random{8};
  for (int round = 0; round < 200; ++round) {
    RotaryConfig rotary;
    const auto draw = [&] { return std::uniform_real_distribution<double>{1e-3, 1e9}(random); };
    rotary = {.theta = draw(),
              .scaling = static_cast<RotaryConfig::Scaling>(pick(random, 0, 2)),
              .factor = draw(),
              .low_freq_factor = draw(),
              .high_freq_factor = 2e9 + draw(),
              .original_max_position = draw()};
    const HeadPlan<float> plan{shape, Window::Config{.sinks = (std::size_t{1} << 40) - pick(random, 0, 1000),
                                                     .recent = std::size_t{1} << 40,
                                                     .rotary_in_cache = rotary}};
    REQUIRE(io::parse_plan(io::format_plan(plan)) == plan);
  }
}

TEST_CASE("a method's plan is read back, and policies that a registry does not know are refused") {
  const HeadGates gates{3, 4, {.1, .9, .2, .8, .7, .1, .6, .2, .5, .5, .5, .5}};
  const auto duo = duo_plan<float16>(shape, gates, {.sparsity = 0.5, .sinks = 4, .recent = 60});
  CHECK(io::parse_plan<float16>(io::format_plan(duo)) == duo);
  const auto any = io::parse_plan<float16>(io::format_plan(duo));
  CHECK(any == duo_plan<float16>(shape, gates, {.sparsity = 0.5, .sinks = 4, .recent = 60}));

  const HeadScores scores{3, 8, 1.0};
  const auto headkv = quantized_headkv_plan<float>(shape, scores);
  CHECK(io::parse_plan<float>(io::format_plan(headkv)) == headkv);
  const auto kivi = kivi_plan<float>(shape);
  CHECK(io::parse_plan<float>(io::format_plan(kivi)) == kivi);

  PolicyRegistry<float> kivi_alone;
  kivi_alone.add<QuantizedResidualCache<float, Granularity::per_channel>>();
  CHECK(io::parse_plan<float>(io::format_plan(kivi), "plan", kivi_alone) == kivi);
  CHECK(refusal(io::format_plan(duo), kivi_alone) ==
        Says{"settings[0]: policy is 'sink_recent', must be full"});
}

TEST_CASE("the shipped sample is read, defaults filled in") {
  const auto plan = io::load_plan(sample_data() / "plan.json");
  CHECK(plan.shape() == ModelShape{4, 8, 4, 64});
  CHECK(plan.has<FullCache<DenseStorage<float>>>(0, 1));
  CHECK(plan.has<QuantizedResidualCache<float, Granularity::per_channel>>(3, 0));
  using Budget = HeadBudgetCache<PerTokenStorage<float>>;
  const auto& budget = plan.at(2, 0).get<Budget>();
  CHECK(budget.scorer == SnapKvScorer::Config{});
  CHECK(budget.storage.bits == 8);
  CHECK(budget.storage.flush == Flush::steady);
  using Chunks = ChunkRetrievalCache<DenseStorage<float>, MinMaxKey>;
  CHECK(plan.at(2, 1).get<Chunks>().budget == 512);
}

TEST_CASE("a plan file is compact: equal settings are listed once") {
  const ModelShape wide{.layers = 80, .q_heads = 64, .kv_heads = 8, .head_dim = 128};
  const HeadGates gates{80, 8, 0.5};
  CHECK(io::format_plan(duo_plan<float>(wide, gates)).size() < 4000);
}

TEST_CASE("a plan is saved and loaded; a file that cannot be written leaves no trace") {
  const TemporaryFolder folder;
  Random random{1};
  const auto plan = random_plan<HeadPlan<float>>(shape, random);
  io::save_plan(folder.path() / "plan.json", plan);
  CHECK(io::load_plan(folder.path() / "plan.json") == plan);
  CHECK_THROWS_AS(io::save_plan(folder.path() / "none" / "plan.json", plan), StorageError);
  std::filesystem::create_directory(folder.path() / "folder");
  CHECK_THROWS_AS(io::save_plan(folder.path() / "folder", plan), StorageError);
  CHECK(std::distance(std::filesystem::directory_iterator{folder.path()}, {}) == 2);
}

TEST_CASE("a file that is no plan, or of another version, is refused") {
  CHECK(refusal("") == Says{"plan.json: is empty"});
  CHECK(refusal("[]") == Says{"must be an object, is an array of 0"});
  CHECK(refusal("{}") == Says{"the key 'format' is missing"});
  CHECK(refusal(R"({"format": "other"})") == Says{"is 'other', must be 'kvpolicy plan'"});
  CHECK(refusal(R"({"format": "kvpolicy plan"})") == Says{"'version' is missing"});
  CHECK(refusal(R"({"format": "kvpolicy plan", "version": 2})") ==
        Says{"is 2, this program reads version 1"});
  CHECK(refusal(R"({"format": "kvpolicy plan", "version": "1"})") == Says{"whole number"});
  CHECK(refusal(plan_text(R"({"policy": "full"})", "[[0, 0]]", R"(, "heads": [[0, 0]])")) ==
        Says{"the key 'heads' is given twice"});
  CHECK(refusal(plan_text(R"({"policy": "full"})", "[[0, 0]]", R"(, "extra": 1)")) ==
        Says{"unknown key 'extra'; known here: format, heads, settings, shape, version"});
  CHECK(refusal(plan_text(R"({"policy": "full"})")) == "");
  CHECK(refusal(plan_text(R"({"policy": "full"})").substr(0, 100)) == Says{"line 2, column"});
}

TEST_CASE("settings that do not work are refused with their position") {
  const auto setting = [](const char* text) { return refusal(plan_text(text)); };
  CHECK(setting("") == Says{"settings: must be an array of at least one"});
  CHECK(setting("3") == Says{"settings[0]: must be an object, is 3"});
  CHECK(setting("{}") == Says{"settings[0]: the key 'policy' is missing"});
  CHECK(setting(R"({"policy": 7})") == Says{"settings[0], policy: must be a string, is 7"});
  CHECK(setting(R"({"policy": "foul"})") ==
        Says{"settings[0]: policy is 'foul', must be full, sink_recent, head_budget or chunk_retrieval"});
  CHECK(setting(R"({"policy": "full"}, {"policy": "full", "sinks": 4})") ==
        Says{"settings[1]: unknown key 'sinks'"});
  CHECK(setting(R"({"policy": "sink_recent", "recent": 0})") ==
        Says{"settings[0]: SinkRecentCache: recent is 0"});
  CHECK(setting(R"({"policy": "sink_recent", "recent": -1})") ==
        Says{"settings[0], recent: must be a whole number, is -1"});
  CHECK(setting(R"({"policy": "sink_recent", "recent": 99999999999999999999})") ==
        Says{"must be a whole number"});
  CHECK(setting(R"({"policy": "sink_recent", "mask": "exakt"})") ==
        Says{"mask: is 'exakt', must be one of exact, chunk"});
  CHECK(setting(R"({"policy": "sink_recent", "rotary_in_cache": {"theta": -1}})") ==
        Says{"theta is -1, must be positive"});
  CHECK(setting(R"({"policy": "sink_recent", "rotary_in_cache": {"theta": "x"}})") ==
        Says{"settings[0], rotary_in_cache, theta: must be a number"});
  CHECK(setting(R"({"policy": "sink_recent", "rotary_in_cache": {"tehta": 1}})") ==
        Says{"settings[0], rotary_in_cache: unknown key 'tehta'"});
  CHECK(setting(R"({"policy": "full", "storage": "dense"})") ==
        Says{"settings[0], storage: must be an object"});
  CHECK(setting(R"({"policy": "full", "storage": {}})") == Says{"'type' is missing"});
  CHECK(setting(R"({"policy": "full", "storage": {"type": "dense", "bits": 4}})") ==
        Says{"settings[0], storage: unknown key 'bits'; known here: type"});
  CHECK(setting(R"({"policy": "full", "storage": {"type": "residual_per_token", "bits": 7}})") ==
        Says{"bits is 7, must be 2, 3, 4, 5, 6 or 8"});
  CHECK(setting(R"({"policy": "full", "storage": {"type": "residual_per_token", "key_group": 48}})") ==
        Says{"key_group is 48, must divide head_dim = 64"});
  // A window over per-channel groups exists in no plan.
  CHECK(setting(R"({"policy": "sink_recent", "storage": {"type": "residual_per_channel"}})") ==
        Says{"settings[0]: storage.type is 'residual_per_channel', must be dense or residual_per_token"});
  CHECK(setting(R"({"policy": "head_budget", "scorer": "h2o", "storage": {"type": "residual_per_token"}})") ==
        Says{"settings[0]: there is no policy 'head_budget over residual_per_token (scorer h2o)'; there are "
             "head_budget over dense, head_budget over residual_per_token"});
  CHECK(setting(R"({"policy": "sink_recent", "scorer": "snapkv"})") ==
        Says{"scorer: is 'snapkv', but sink_recent has no scorer"});
  CHECK(setting(R"({"policy": "head_budget", "summary": "mean"})") ==
        Says{"summary: is 'mean', but head_budget has no summary"});
  CHECK(setting(R"({"policy": "chunk_retrieval", "summary": "median"})") ==
        Says{"settings[0]: summary is 'median', must be mean or minmax"});
  CHECK(setting(R"({"policy": "head_budget", "kernel": 4})") == Says{"kernel is 4, must be odd"});
  CHECK(setting(R"({"policy": "chunk_retrieval", "chunk": 8, "budget": 12})") ==
        Says{"must be a positive multiple of chunk = 8"});
}

TEST_CASE("shapes and heads that do not fit are refused") {
  const auto heads = [](const char* text) { return refusal(plan_text(R"({"policy": "full"})", text)); };
  CHECK(heads("7") == Says{"heads: must be an array of 1 layers, is 7"});
  CHECK(heads("[[0, 0], [0, 0]]") == Says{"must be an array of 1 layers, is an array of 2"});
  CHECK(heads("[[0]]") == Says{"heads[0]: must be an array of 2 KV heads, is an array of 1"});
  CHECK(heads("[0]") == Says{"heads[0]: must be an array of 2 KV heads, is 0"});
  CHECK(heads("[[0, 1]]") == Says{"heads[0]: is 1, must be at most 0"});
  CHECK(heads("[[0, -1]]") == Says{"heads[0]: must be a whole number, is -1"});
  CHECK(heads("[[0, 0.5]]") == Says{"heads[0]: must be a whole number"});
  const auto with_shape = [](const char* text) {
    return refusal(message(R"({"format": "kvpolicy plan", "version": 1, "shape": )", text,
                           R"(, "settings": [{"policy": "full"}], "heads": [[0]]})"));
  };
  CHECK(with_shape(R"({"layers": 1, "q_heads": 3, "kv_heads": 2, "head_dim": 64})") ==
        Says{"shape: ModelShape: q_heads is 3"});
  CHECK(with_shape(R"({"layers": 1, "q_heads": 2, "kv_heads": 2, "head_dim": 65})") ==
        Says{"head_dim is 65"});
  CHECK(with_shape(R"({"layers": 1, "q_heads": 2, "kv_heads": 2})") ==
        Says{"shape: the key 'head_dim' is missing"});
  CHECK(with_shape(R"({"layers": 1048576, "q_heads": 2, "kv_heads": 2, "head_dim": 64})") ==
        Says{"2097152 KV heads in all, must be at most 1048576"});
  CHECK(with_shape(R"({"layers": 0, "q_heads": 2, "kv_heads": 2, "head_dim": 64})") == Says{"layers is 0"});
}
