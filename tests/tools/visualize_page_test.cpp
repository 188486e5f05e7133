// SPDX-License-Identifier: Apache-2.0
//
// The page of visualize without a browser: whether it holds what was recorded, read by a decoder of its
// own; whether it stays within its size; and whether text can break out of it. open_page.cmake opens a
// page in a browser.
#include <visualize/page.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Plan = HeadPlan<bfloat16>;
using Dense = DenseStorage<bfloat16>;

const TextModel& model() {
  static const TextModel made = random_text_model();
  return made;
}

// Each head has another policy and storage.
Plan mixed_plan() {
  Plan plan{model().config().shape()};
  SinkRecentCache<PerTokenStorage<bfloat16>>::Config window{.sinks = 3, .recent = 40};
  window.storage = {.bits = 8, .value_bits = 4, .key_group = 32, .value_group = 32, .residual = 16};
  plan.set(0, 0, window);
  plan.set(0, 1, ChunkRetrievalCache<Dense>::Config{.chunk = 8, .budget = 24});
  plan.set(1, 0, HeadBudgetCache<Dense>::Config{.budget = 20, .scorer = {.observation_window = 4}});
  return plan;
}

Recording recording_of(std::string_view text, const Plan& plan, float least_attention = 0.0005F) {
  std::vector<int> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  Recording made =
      record(model(), plan, tokens, {.prompt_steps = 12, .most_new = 5, .least_attention = least_attention});
  made.model = "random";
  made.plan = "mixed";
  return made;
}

std::string long_text() {
  std::string text;
  for (std::size_t i = 0; i < 60; ++i) text += "word " + std::to_string(i * i) + ". ";
  return text;
}

std::size_t count(std::string_view text, std::string_view part) {
  std::size_t times = 0;
  for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++times;
  return times;
}

// Cuts the page like a browser: the element ends at the first end tag.
nlohmann::json data_of(const std::string& html) {
  const std::string_view start = "id=\"recording\">";
  const std::size_t from = html.find(start) + start.size();
  return nlohmann::json::parse(html.substr(from, html.find("</script", from) - from));
}

std::vector<std::uint8_t> decoded(const std::string& base64) {
  const std::string_view letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  REQUIRE(base64.size() % 4 == 0);
  std::vector<std::uint8_t> bytes;
  std::uint32_t bits = 0;
  unsigned held = 0;
  for (const char c : base64) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<std::uint32_t>(letters.find(c));
    held += 6;
    if (held < 8) continue;
    held -= 8;
    bytes.push_back(static_cast<std::uint8_t>(bits >> held));
  }
  return bytes;
}

// Reads the layout that page.cpp describes.
class Reader {
 public:
  explicit Reader(std::vector<std::uint8_t> bytes) : bytes_{std::move(bytes)} {}

  std::size_t byte() { return bytes_.at(at_++); }
  std::size_t number() {
    const std::size_t low = byte();
    return low < 128 ? low : low - 128 + 128 * number();
  }
  std::vector<std::size_t> untils(std::size_t rows) {
    std::vector<std::size_t> until;
    for (std::size_t runs = number(); runs > 0; --runs) {
      const std::size_t length = number();
      until.insert(until.end(), length, number());
    }
    CHECK((until.empty() || until.size() == rows));
    return until;
  }
  [[nodiscard]] bool at_end() const { return at_ == bytes_.size(); }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

void check_rows(const Recording& recording, const std::string& base64, float least) {
  Reader reader{decoded(base64)};
  const std::size_t rows = recording.tokens.size();
  for (std::size_t head = 0; head < recording.heads.shape().kv_head_count(); ++head) {
    const auto until = reader.untils(rows);
    const auto exact_until = reader.untils(rows);
    for (std::size_t s = 0; s < recording.steps.size(); ++s) {
      CAPTURE(head);
      CAPTURE(s);
      const Step& step = recording.steps[s];
      const HeadStep& own = step.heads[head];
      const std::size_t how = reader.byte();
      std::vector<bool> read(rows);
      if (how == 3) {
        std::size_t end = 0;
        for (std::size_t runs = reader.number(); runs > 0; --runs) {
          end += reader.number();
          for (std::size_t length = reader.number(); length > 0; --length) read.at(end++) = true;
        }
      }
      const std::size_t before = s == 0 ? 0 : recording.steps[s - 1].tokens;
      for (std::size_t row = 0; row < step.tokens; ++row) {
        if (how == 1) read[row] = until[row] > s;
        if (how == 2) read[row] = row >= before || until[row] + 1 > s;
        CHECK(holds_row(own.kept, row) == (until[row] > s));
        const bool exact = exact_until.empty() ? until[row] > s : exact_until[row] > s;
        CHECK(holds_row(own.exact, row) == exact);
      }
      for (std::size_t row = 0; row < rows; ++row) CHECK(holds_row(own.read, row) == read[row]);
      std::size_t next = reader.number();
      std::size_t row = 0;
      for (const RowAttention& attention : own.attention) {
        if (attention.share < least) continue;
        REQUIRE(next > 0);
        row += reader.number();
        CHECK(row == attention.row);
        ++row;
        --next;
        const double root = static_cast<double>(reader.byte()) / 255;
        CHECK(std::abs(root - std::sqrt(static_cast<double>(attention.share))) <= 0.501 / 255);
      }
      CHECK(next == 0);
    }
  }
  CHECK(reader.at_end());
}

}  // namespace

TEST_CASE("a page holds what was recorded") {
  const Recording recording = recording_of(long_text(), mixed_plan());
  const HtmlPage page = write_page(recording);
  const nlohmann::json data = data_of(page.html);
  CHECK(data["plan"] == "mixed");
  CHECK(data["layers"] == 2);
  CHECK(data["kvHeads"] == 2);
  CHECK(data["group"] == 2);
  CHECK(data["promptTokens"] == recording.prompt_tokens);
  CHECK(data["tokens"] == recording.tokens);
  CHECK(data["texts"] == recording.texts);
  REQUIRE(data["steps"].size() == recording.steps.size());
  REQUIRE(data["heads"].size() == 4);
  for (std::size_t step = 0; step < recording.steps.size(); ++step) {
    CHECK(data["steps"][step]["tokens"] == recording.steps[step].tokens);
    CHECK(data["steps"][step]["bytes"] == recording.steps[step].bytes);
    for (std::size_t head = 0; head < 4; ++head) {
      CHECK(data["heads"][head]["bytes"][step] == recording.steps[step].heads[head].bytes);
      CHECK(data["heads"][head]["bytesRead"][step] == recording.steps[step].heads[head].bytes_read);
    }
  }
  const auto kind = [&](std::size_t head) {
    return data["kinds"][data["heads"][head]["kind"].get<std::size_t>()];
  };
  CHECK(kind(0) == nlohmann::json{{"policy", "sink_recent"}, {"keyBits", 8}, {"valueBits", 4}});
  CHECK(kind(1) == nlohmann::json{{"policy", "chunk_retrieval"}, {"keyBits", 0}, {"valueBits", 0}});
  CHECK(kind(2) == nlohmann::json{{"policy", "head_budget"}, {"keyBits", 0}, {"valueBits", 0}});
  CHECK(kind(3) == nlohmann::json{{"policy", "full"}, {"keyBits", 0}, {"valueBits", 0}});
  CHECK(data["leastShown"] == page.least_shown);
  check_rows(recording, data["rows"].get<std::string>(), page.least_shown);
}

TEST_CASE("a page holds what a read with a bound left, for heads that have one") {
  const ModelShape shape = model().config().shape();
  Plan plan{shape};
  plan.set(1, 0, LowBitFormat::of_bounded(shape, 4, 16).head<bfloat16>());
  std::vector<int> tokens;
  for (const char c : long_text()) tokens.push_back(static_cast<unsigned char>(c));
  const Recording recording =
      record(model(), plan, tokens,
             {.prompt_steps = 4, .most_new = 3, .reading = Reading{.read = Read::bounded, .epsilon = 0.2F}});
  const nlohmann::json data = data_of(write_page(recording).html);
  for (std::size_t head = 0; head < 4; ++head) {
    for (std::size_t step = 0; step < recording.steps.size(); ++step) {
      CAPTURE(head);
      CAPTURE(step);
      const auto& own = recording.steps[step].heads[head].unread;
      CHECK(own.has_value() == (recording.steps[step].kind == StepKind::generate));
      const nlohmann::json& shown = data["heads"][head]["unread"][step];
      REQUIRE(shown.is_null() == !own.has_value());
      if (!own) continue;
      CHECK(std::abs(shown[0].get<double>() - 1e6 * static_cast<double>(own->bound)) <= 0.51);
      CHECK(std::abs(shown[1].get<double>() - 1e6 * static_cast<double>(own->measured)) <= 0.51);
      CHECK((head == 2 ? own->bound > 0.0F : own->bound == 0.0F));
    }
  }
  CHECK(data["kinds"][data["heads"][2]["kind"].get<std::size_t>()]["valueBits"] == 4);
}

TEST_CASE("a page leaves out the smallest shares of attention rather than grow") {
  const Recording recording = recording_of(long_text(), mixed_plan());
  const HtmlPage whole = write_page(recording);
  CHECK(whole.html.size() < 1'900'000);
  const std::size_t most = whole.html.size() - 1500;
  const HtmlPage smaller = write_page(recording, most);
  CHECK(smaller.html.size() <= most);
  CHECK(smaller.least_shown > whole.least_shown);
  check_rows(recording, data_of(smaller.html)["rows"].get<std::string>(), smaller.least_shown);
  // If a page cannot be that small, it is written nevertheless.
  const HtmlPage smallest = write_page(recording, 1);
  CHECK(smallest.html.size() < smaller.html.size());
  CHECK(data_of(smallest.html)["heads"].size() == 4);
}

TEST_CASE("no text breaks out of a page") {
  const std::string hostile = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)>";
  Recording recording = recording_of(hostile, Plan{model().config().shape()});
  const std::string plain = write_page(recording).html;
  recording.plan = hostile;
  recording.model = hostile + "\xFF\xC3";  // no valid UTF-8 either
  const std::string html = write_page(recording).html;
  for (const std::string_view part : {"<script", "</script", "<!--", "<img", "onerror=alert(2)>"}) {
    CAPTURE(part);
    const bool in_text = part.front() != '<';
    CHECK(count(html, part) == count(plain, part) + (in_text ? 2 : 0));
  }
  CHECK(data_of(html)["plan"] == hostile);
}

TEST_CASE("a page loads nothing from elsewhere") {
  const std::string html = write_page(recording_of("abc", Plan{model().config().shape()})).html;
  // Names of namespaces are not addresses that are loaded.
  CHECK(count(html, "://") == count(html, "'http://www.w3.org/2000/svg'"));
  for (const std::string_view part : {" src=", "<link", "@import", "url(", "fetch(", "innerHTML", "eval(",
                                      "document.write", "/*page.", "<!--recording"}) {
    CAPTURE(part);
    CHECK(count(html, part) == 0);
  }
  CHECK(count(html, "default-src 'none'") == 1);
}

TEST_CASE("the texts of a page's tokens join to the text, whatever a token is") {
  const std::string text = "In the beginning <b>\u00fcber \u4e16 42";
  for (const TextModel& any : {random_text_model(), random_word_model()}) {
    const std::vector<int> prompt = any.encode(text);
    const Recording recording =
        record(any, Plan{any.config().shape()}, prompt, {.prompt_steps = 4, .most_new = 0});
    const HtmlPage page = write_page(recording);
    const nlohmann::json data = data_of(page.html);
    CHECK(data["tokens"] == prompt);
    REQUIRE(data["texts"].size() == prompt.size());
    std::string joined;
    for (const auto& one : data["texts"]) joined += one.get<std::string>();
    CHECK(joined == text);
    CHECK(page.html.find("<b>") == std::string::npos);
  }
}
