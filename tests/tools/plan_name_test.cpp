// SPDX-License-Identifier: Apache-2.0
#include <common/error_text.hpp>
#include <common/json_line.hpp>
#include <common/plan_name.hpp>

#include <string>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

// "name|source|storage|method"
std::string parts(const std::string& text) {
  const PlanName plan{text};
  return plan.name + "|" + plan.source + "|" + plan.storage + "|" + plan.method();
}

template <class Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a plan's name has parts") {
  CHECK(parts("full") == "full|||full");
  CHECK(parts("headkv:128,16") == "headkv|||headkv");
  CHECK(parts("headkv+int4:128,kernel=29,beta=2") == "headkv||int4|headkv+int4:kernel=29,beta=2");
  CHECK(parts("duo@a:b/c+d+int4:0.5") == "duo|a:b/c+d|int4|duo@a:b/c+d+int4");
  CHECK(parts("duo@a:b/c+d+k8v4:0.5") == "duo|a:b/c+d|k8v4|duo@a:b/c+d+k8v4");
  CHECK(parts("duo+int4@a:b/c:0.5,mask=chunk") == "duo|a:b/c|int4|duo+int4@a:b/c:mask=chunk");
  CHECK(parts("headkv@scores.json:64") == "headkv|scores.json||headkv@scores.json");
  CHECK(parts("duo@p/lr=0.02,x:0.5") == "duo|p/lr=0.02,x||duo@p/lr=0.02,x");
  CHECK(parts("search@d.json:0.25,4096") == "search|d.json||search@d.json");
  // A text that is not a name is a path as a whole.
  CHECK(parts("plans/a:b+int4,c=1") == "plans/a:b+int4,c=1|||plans/a:b+int4,c=1");
  CHECK(parts("a@b/plan.json") == "a|b/plan.json||a@b/plan.json");
}

TEST_CASE("numbers are positional, settings have names, and everything that was used is known") {
  PlanName plan{"headkv:128,kernel=29,beta=2"};
  plan.place({"capacity", "window"});
  CHECK(plan.count("capacity", 1) == 128);
  CHECK(plan.count("window", 8) == 8);
  CHECK(plan.number("beta", 1.005) == 2.0);
  CHECK(plan.choice("pooling", Pooling::max) == Pooling::max);
  CHECK(plan.count("kernel", 7) == 29);
  plan.refuse_others();
  CHECK(shown_settings(plan.settings()) == "capacity 128, window 8, beta 2.0, pooling max, kernel 29");
  CHECK(plan.with_numbers("64") == "headkv:64,kernel=29,beta=2");
  PlanName placed{"x:a=3,4"};
  placed.place({"b"});
  CHECK(placed.count("b", 0) == 4);
  CHECK(placed.count("a", 0) == 3);
}

TEST_CASE("a setting that is given twice, misspelt or superfluous is refused") {
  const auto taken = [](const std::string& text) {
    return refusal([&] {
      PlanName plan{text};
      plan.place({"capacity"});
      static_cast<void>(plan.count("capacity", 1));
      static_cast<void>(plan.choice("pooling", Pooling::max));
      plan.refuse_others();
    });
  };
  CHECK(taken("snapkv:7") == "");
  CHECK(taken("snapkv:7,9") == "--plan snapkv:7,9: snapkv takes at most 1 numbers, has 2");
  CHECK(taken("snapkv:7,capacity=9") == "--plan snapkv:7,capacity=9: gives capacity twice");
  CHECK(taken("snapkv:kernel=7") ==
        "--plan snapkv:kernel=7: snapkv has no setting 'kernel', only capacity, pooling");
  CHECK(taken("snapkv:pooling=mean") ==
        "--plan snapkv:pooling=mean: pooling is 'mean', must be one of max, average");
  for (const char* wrong : {"snapkv:", "snapkv:-1", "snapkv:1.5", "snapkv:1x", "snapkv:1,,2", "snapkv:=1",
                            "snapkv:18446744073709551616", "snapkv:1099511627777", "snapkv:capacity="}) {
    CAPTURE(wrong);
    CHECK(taken(wrong) != "");
  }
  CHECK(refusal([] { PlanName{"a:b=1,b=2"}; }) == "--plan a:b=1,b=2: gives b twice");
  CHECK(refusal([] { PlanName{"duo+int4@x+int2"}; }) ==
        "--plan duo+int4@x+int2: gives the bits twice, int4 and int2");
  CHECK(refusal([] { static_cast<void>(PlanName{"a:b=nan"}.number("b", 0)); }) != "");
}

TEST_CASE("a library's error names the option instead of the C++ type") {
  const auto said = [](const std::string& what) {
    return refusal(
        [&] { static_cast<void>(named_by("--plan x", [&]() -> int { throw ConfigError{what}; })); });
  };
  CHECK(said("HeadKvBudgetConfig: capacity is 4") == "--plan x: capacity is 4");
  CHECK(said("HeadPlan::limit_window: window is 0") == "--plan x: window is 0");
  CHECK(said("duo_plan: gates do not fit") == "--plan x: gates do not fit");
  CHECK(said("the capacity: is 4") == "--plan x: the capacity: is 4");
  CHECK(said("nothing") == "--plan x: nothing");
  // A name in a message is not changed: a file may be called like a type.
  CHECK(refusal([] {
          static_cast<void>(named_by("--plan x", [] {
            return named_by("Scores", []() -> int { throw ConfigError{"HeadScores: there are none"}; });
          }));
        }) == "--plan x: Scores: there are none");
}

TEST_CASE("JSON is printed for any bytes in an option") {
  CHECK(as_line(nlohmann::json{{"plan", "a\xff"}}) == "{\"plan\":\"a\xEF\xBF\xBD\"}");
}
