// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/io/named_plan.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "says.hpp"
#include "support/compare.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

// The message of the error that the name ends in; "" if there is a plan.
std::string refusal(std::string_view name, const ModelShape& own = shape) {
  try {
    (void)io::named_plan<float>(name, own);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The table of settings and heads of a plan file, written by hand.
HeadPlan<float> written(const char* settings, const char* heads, const char* head_dim = "64") {
  return io::parse_plan<float>(message(
      R"({"format": "kvpolicy plan", "version": 1, "shape": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": )",
      head_dim, R"(}, "settings": [)", settings, R"(], "heads": )", heads, "}"));
}

bool same(const HeadPlan<float>& a, const HeadPlan<float>& b) {
  return io::format_plan(a) == io::format_plan(b);
}

void write_pattern(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  io::write_text_file(folder / "full_attention_heads.tsv", "0.9\t0.1\n0.2\t0.8\n");
  io::write_text_file(folder / "config.json", R"({"sink_size": 3, "recent_size": 20})");
}

}  // namespace

TEST_CASE("named_plan: a name is the plan file that its description says") {
  const char* all = "[[0, 0], [0, 0]]";
  CHECK(same(io::named_plan<float>("full", shape), written(R"({"policy": "full"})", all)));
  CHECK(same(io::named_plan<float>("sink_recent:4,100", shape),
             written(R"({"policy": "sink_recent", "sinks": 4, "recent": 100})", all)));
  CHECK(same(io::named_plan<float>("sink_recent", shape),
             written(R"({"policy": "sink_recent", "sinks": 16, "recent": 128})", all)));
  const auto codes = [](const char* type, const char* bits, const char* groups, const char* residual,
                        const char* rotated = R"(, "key_hadamard": true, "value_hadamard": true)") {
    return message(R"({"policy": "full", "sinks": 4, "storage": {"type": "residual_per_)", type,
                   R"(", "bits": )", bits, ", ", groups, R"(, "residual": )", residual, rotated, "}}");
  };
  for (const char* bits : {"6", "5", "4", "3"}) {
    const auto of = [&](const char* values, const char* residual) {
      return codes("channel", bits, message(R"("key_group": 64, "value_group": )", values).c_str(), residual);
    };
    CHECK(same(io::named_plan<float>(message("int", bits), shape), written(of("64", "128").c_str(), all)));
    CHECK(
        same(io::named_plan<float>(message("int", bits, ":0"), shape), written(of("64", "0").c_str(), all)));
    // 64 divides neither 8 nor 48.
    CHECK(same(io::named_plan<float>(message("int", bits),
                                     {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 8}),
               written(of("8", "128").c_str(), all, "8")));
    CHECK(same(io::named_plan<float>(message("int", bits),
                                     {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 48}),
               written(of("16", "128").c_str(), all, "48")));
  }
  CHECK(same(io::named_plan<float>("int8", shape),
             written(codes("token", "8", R"("key_group": 64, "value_group": 64)", "128", "").c_str(), all)));
  CHECK(same(io::named_plan<float>("int2", shape),
             written(codes("channel", "2", R"("key_group": 32, "value_group": 32)", "128").c_str(), all)));
  CHECK(same(io::named_plan<float>("k8v4:7", shape),
             written(codes("token", "8", R"("value_bits": 4, "key_group": 64, "value_group": 64)", "7",
                           R"(, "value_hadamard": true)")
                         .c_str(),
                     all)));
  CHECK(same(
      io::named_plan<float>("k3v2", shape),
      written(codes("channel", "3", R"("value_bits": 2, "key_group": 64, "value_group": 32)", "128").c_str(),
              all)));
}

TEST_CASE("named_plan: a name may say what codes stand for") {
  const auto all_as = [](const char* storage) {
    return written(message(R"({"policy": "full", )", storage, "}}").c_str(), "[[0, 0], [0, 0]]");
  };
  CHECK(same(
      io::named_plan<float>("int2:normal=values", shape),
      all_as(
          R"("sinks": 4, "storage": {"type": "residual_per_channel", "bits": 2, "key_group": 32, "value_group": 32,
                "residual": 128, "key_hadamard": true, "value_hadamard": true, "value_codebook": "normal")")));
  CHECK(
      same(io::named_plan<float>("int4:keys=token,normal=both,hadamard=both,group=64,sinks=0", shape),
           all_as(R"("storage": {"type": "residual_per_token", "bits": 4, "key_group": 64, "value_group": 64,
                "residual": 128, "key_hadamard": true, "value_hadamard": true, "key_codebook": "normal",
                "value_codebook": "normal")")));
  CHECK(same(
      io::named_plan<float>("fp8", shape),
      all_as(
          R"("storage": {"type": "residual_per_token", "bits": 8, "key_group": 0, "value_group": 0, "residual": 0,
                "key_codebook": "fp8", "value_codebook": "fp8")")));
  CHECK(same(
      io::named_plan<float>("nvfp4:scale=0.25,residual=32", shape),
      all_as(
          R"("storage": {"type": "residual_per_token", "bits": 4, "key_group": 0, "value_group": 0, "residual": 32,
                "key_codebook": "nvfp4", "value_codebook": "nvfp4", "key_scale": 0.25, "value_scale": 0.25)")));
  CHECK(same(
      io::named_plan<float>("mxfp4", shape),
      all_as(
          R"("storage": {"type": "residual_per_token", "bits": 4, "key_group": 0, "value_group": 0, "residual": 0,
                "key_codebook": "mxfp4", "value_codebook": "mxfp4")")));
  const auto refused = [](const char* name) {
    return test::thrown<ConfigError>([&] { static_cast<void>(io::named_plan<float>(name, shape)); });
  };
  CHECK(refused("mxfp4:scale=2").find("scale") != std::string::npos);
  CHECK(refused("fp8:group=8").find("group") != std::string::npos);
  CHECK(refused("int4:normal=keys").find("per channel") != std::string::npos);
  CHECK(refused("int8:normal=values").find("2, 3 or 4 bits, not 8") != std::string::npos);
  CHECK(refused("fp8:scale=0").find("from 2^-60 to 2^60") != std::string::npos);
}

TEST_CASE("named_plan: a name may say what is rotated, what shares a scale and what stays exact") {
  const auto all_as = [](const char* policy) {
    return written(message(R"({"policy": "full", )", policy, "}").c_str(), "[[0, 0], [0, 0]]");
  };
  CHECK(
      same(io::named_plan<float>("hf4", shape),
           all_as(R"("storage": {"type": "residual_per_token", "bits": 4, "key_group": 64, "value_group": 64,
                       "residual": 128})")));
  CHECK(
      same(io::named_plan<float>("hf2:32,group=16", shape),
           all_as(R"("storage": {"type": "residual_per_token", "bits": 2, "key_group": 16, "value_group": 16,
                       "residual": 32})")));
  CHECK(same(
      io::named_plan<float>("int4:32,hadamard=none", shape),
      all_as(
          R"("sinks": 4, "storage": {"type": "residual_per_channel", "bits": 4, "key_group": 64, "value_group": 64,
                "residual": 32})")));
  CHECK(same(io::named_plan<float>("int4:keys=token", shape),
             all_as(R"("sinks": 4, "storage": {"type": "residual_per_token", "bits": 4, "key_group": 32,
                       "value_group": 32, "residual": 128})")));
  CHECK(same(
      io::named_plan<float>("k3v4:hadamard=values,key_group=16,group=32,sinks=9", shape),
      all_as(
          R"("sinks": 9, "storage": {"type": "residual_per_channel", "bits": 3, "value_bits": 4, "key_group": 16,
                "value_group": 32, "residual": 128, "value_hadamard": true})")));
  CHECK(same(io::named_plan<float>("int4:keys=token,hadamard=keys,residual=7", shape),
             all_as(R"("sinks": 4, "storage": {"type": "residual_per_token", "bits": 4, "key_group": 32,
                       "value_group": 32, "residual": 7, "key_hadamard": true})")));
  CHECK(same(
      io::named_plan<float>("int8:halves=yes", shape),
      all_as(
          R"("sinks": 4, "storage": {"type": "residual_per_channel", "bits": 8, "key_group": 64, "value_group": 64,
                "residual": 128, "key_hadamard": true, "value_hadamard": true, "halves": true})")));
  CHECK(same(io::named_plan<float>("int8:halves=yes,keys=token,hadamard=none", shape),
             all_as(R"("sinks": 4, "storage": {"type": "residual_per_token", "bits": 8, "key_group": 32,
                       "value_group": 32, "residual": 128, "halves": true})")));
  CHECK(same(io::named_plan<float>("int8:keys=channel", shape),
             all_as(R"("sinks": 4, "storage": {"type": "residual_per_channel", "bits": 8, "key_group": 64,
                       "value_group": 64, "residual": 128})")));
  CHECK(same(io::named_plan<float>("sink_recent:recent=100,sinks=4", shape),
             io::named_plan<float>("sink_recent:4,100", shape)));

  CHECK(refusal("int4:hadamard=yes") ==
        Says{"plan 'int4:hadamard=yes': hadamard is 'yes', must be one of none, keys"});
  CHECK(refusal("int4:keys=row") == Says{"keys is 'row', must be one of token, channel"});
  CHECK(refusal("int4:keys=token,key_group=8") == Says{"int4 has no setting 'key_group', only keys, group"});
  CHECK(refusal("int4:64,residual=32") == Says{"gives residual twice"});
  CHECK(refusal("int4:group=0") == Says{"group is 0, must be at least 1"});
  CHECK(refusal("int4:group=7") == Says{"value_group is 7, must divide"});
  CHECK(refusal("full:hadamard=both") == Says{"full has no setting 'hadamard', nor any other"});
  CHECK(refusal("hf4:keys=channel") == Says{"hf4 has no setting 'keys', only group, residual"});
  CHECK(refusal("hf8") == Says{"is not known"});
}

TEST_CASE("named_plan: a DuoAttention pattern, whatever its folder is called") {
  const TemporaryFolder folder;
  for (const char* name : {"pattern", "a:b,c+int4@d"}) {
    const auto pattern = folder.path() / name;
    write_pattern(pattern);
    const char* window = R"({"policy": "sink_recent", "sinks": 3, "recent": 20})";
    const std::string full = message(R"({"policy": "full"}, )", window);
    CHECK(same(io::named_plan<float>(message("duo@", pattern.string(), "/:0.5"), shape),
               written(full.c_str(), "[[0, 1], [1, 0]]")));
    CHECK(same(io::named_plan<float>(message("duo@", pattern.string(), "/:0.75"), shape),
               written(full.c_str(), "[[0, 1], [1, 1]]")));
    const std::string codes = message(
        R"({"policy": "full", "sinks": 4, "storage": {"type": "residual_per_channel", "bits": 4, "key_group": 64, "value_group": 64, "residual": 128, "key_hadamard": true, "value_hadamard": true}}, )",
        window);
    CHECK(same(io::named_plan<float>(message("duo+int4@", pattern.string(), "/"), shape),
               written(codes.c_str(), "[[0, 1], [1, 0]]")));
    const std::string rotated = message(
        R"({"policy": "full", "sinks": 4, "storage": {"type": "residual_per_token", "bits": 8, "value_bits": 4, "key_group": 64, "value_group": 64, "residual": 128, "value_hadamard": true}}, )",
        window);
    CHECK(same(io::named_plan<float>(message("duo@", pattern.string(), "/+k8v4:0.5"), shape),
               written(rotated.c_str(), "[[0, 1], [1, 0]]")));
    const std::string fp8 = message(
        R"({"policy": "full", "storage": {"type": "residual_per_token", "bits": 8, "key_group": 0, "value_group": 0, "residual": 0, "key_codebook": "fp8", "value_codebook": "fp8", "key_scale": 0.5, "value_scale": 0.5}}, )",
        window);
    CHECK(same(io::named_plan<float>(message("duo@", pattern.string(), "/+fp8:0.5,scale=0.5"), shape),
               written(fp8.c_str(), "[[0, 1], [1, 0]]")));
  }
  const std::string plain = message("duo@", (folder.path() / "pattern").string());
  CHECK(same(io::named_plan<float>(plain, shape), io::named_plan<float>(message(plain, ":0.5"), shape)));
  CHECK(refusal(message(plain, ":50")) == Says{"sparsity is 50"});
  CHECK(refusal(message(plain, ":nan")) == Says{"sparsity"});
  CHECK(refusal(message(plain, ":0.5,1")) == Says{"takes at most 1 numbers, has 2"});
  CHECK(refusal(message(plain, ":sinks=3")) == Says{"duo has no setting 'sinks', only sparsity"});
  CHECK(refusal(message("duo+int7@", plain.substr(4))) == Says{"'int7' is not int8"});
  CHECK(refusal(plain, {.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64}) == Says{"3"});
}

TEST_CASE("named_plan: a plan file must be for the shape") {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "a:b@c.json").string();
  const auto plan = written(R"({"policy": "full"}, {"policy": "sink_recent", "sinks": 1, "recent": 9})",
                            "[[0, 1], [1, 1]]");
  io::write_text_file(path, io::format_plan(plan));
  CHECK(same(io::named_plan<float>(path, shape), plan));
  CHECK(refusal(path, {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 128}) ==
        Says{R"("head_dim":64}; the model has {"layers":2,"q_heads":4,"kv_heads":2,"head_dim":128})"});
  CHECK(refusal((folder.path() / "none.json").string()) == Says{"none.json"});
}

TEST_CASE("named_plan: any other name is refused, with what is known") {
  for (const char* name :
       {"", "none", "full+int4", "full@x", "int7", "int44", "k4v1", "v4k4", "k4v", "int4+int8", "int4@x",
        "sink_recent+int4", "duo+int7@x", "duo+@x:0.5:", "int4 ", "FULL"}) {
    CAPTURE(name);
    CHECK(refusal(name) != "");
  }
  CHECK(refusal("none") == Says{"plan 'none': is not known; known are full, int4"});
  CHECK(refusal("duo:0.5") == Says{"duo@FOLDER:0.5"});
  CHECK(refusal("full:1") == Says{"takes at most 0 numbers, has 1"});
  CHECK(refusal("int4:1,2") == Says{"takes at most 1 numbers, has 2"});
  for (const char* digits : {"", "x", "-1", "1.5", "99999999999999999999999", " 1"}) {
    CAPTURE(digits);
    CHECK(refusal(message("int4:", digits)) == Says{"which is not a whole number"});
  }
  CHECK(refusal("int4:1099511627777") == Says{"residual is 1099511627777, must be at most 2^40"});
  CHECK(refusal("sink_recent:4,0") == Says{"recent"});
  CHECK(refusal("full", {.layers = 0, .q_heads = 4, .kv_heads = 2, .head_dim = 64}) != "");
}
