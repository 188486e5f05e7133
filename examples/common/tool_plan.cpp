// SPDX-License-Identifier: Apache-2.0
#include "../tool_plan.hpp"

#include <algorithm>
#include <charconv>
#include <concepts>
#include <string_view>
#include <type_traits>
#include <vector>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/kivi.hpp>
#include <kvpolicy/pyramidkv.hpp>
#include <kvpolicy/streaming_llm.hpp>
#include <reference_model/config.hpp>

#include "plan_search.hpp"

namespace kvpolicy::tools {
namespace {

namespace fs = std::filesystem;

// "duo@gates/mine+int4:0.5" is the name "duo", the source "gates/mine", the storage "int4" and the
// numbers {0.5}.
struct Spec {
  std::string_view text;
  std::string_view name;
  std::string_view source;   // a path; empty: beside the model's weights
  std::string_view storage;  // empty: exact rows
  std::vector<std::string_view> numbers;

  explicit Spec(std::string_view all) : text{all} {
    // In a path a : and a + may be part of it; only its last part can be followed by either.
    const bool sourced = all.starts_with("duo@") || all.starts_with("headkv@");
    const std::size_t slash = sourced ? all.rfind('/') : std::string_view::npos;
    const std::size_t last = slash == std::string_view::npos ? 0 : slash;
    const std::size_t colon = all.find(':', last);
    name = all.substr(0, colon);
    const std::size_t plus = sourced ? name.rfind("+int") : name.find('+');
    if (plus != std::string_view::npos && plus >= last) {
      storage = name.substr(plus + 1);
      name = name.substr(0, plus);
    }
    if (sourced) {
      source = name.substr(name.find('@') + 1);
      name = name.substr(0, name.find('@'));
    }
    if (colon == std::string_view::npos) return;
    for (std::string_view rest = all.substr(colon + 1);;) {
      const std::size_t comma = rest.find(',');
      numbers.push_back(rest.substr(0, comma));
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
  }

  [[nodiscard]] std::size_t count(std::size_t place, std::size_t otherwise) const {
    return number<std::size_t>(place, otherwise, "a whole number");
  }
  [[nodiscard]] double share(std::size_t place, double otherwise) const {
    return number<double>(place, otherwise, "a number");
  }
  void at_most(std::size_t most) const {
    require(numbers.size() <= most, "--plan ", text, ": ", name, " takes at most ", most,
            " numbers, has ", numbers.size());
  }
  void exact_rows() const {
    require(storage.empty(), "--plan ", text, ": ", name, " cannot be combined with ", storage);
  }

 private:
  template <class T>
  [[nodiscard]] T number(std::size_t place, T otherwise, const char* what) const {
    if (place >= numbers.size()) return otherwise;
    const std::string_view digits = numbers[place];
    T value{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    require(error == std::errc{} && end == digits.data() + digits.size(), "--plan ", text, ": '",
            digits, "' is not ", what);
    return value;
  }
};

// int8, int4, int2: 0 for any other text.
std::size_t bits_named(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return 0;
  const std::string_view bits = name.substr(prefix.size());
  return bits == "8" ? 8 : bits == "4" ? 4 : bits == "2" ? 2 : 0;
}

// 32 channels share a scale, fewer where 32 does not divide the row.
std::size_t group_for(const ModelShape& shape) { return shape.head_dim % 32 == 0 ? 32 : 16; }

ResidualConfig per_token(const Spec& spec, std::string_view name, const ModelShape& shape,
                         std::size_t residual) {
  const std::size_t bits = bits_named(name, "int");
  require(bits != 0, "--plan ", spec.text, ": '", name, "' is not int8, int4 or int2");
  return {.bits = bits,
          .key_group = group_for(shape),
          .value_group = group_for(shape),
          .residual = residual};
}

template <Element E>
class Maker {
 public:
  using Plan = AnyPlan<E>;
  using Dense = DenseStorage<E>;
  using Codes = PerTokenStorage<E>;

  Maker(const PlanArguments& arguments, const ModelShape& shape, const fs::path& weights)
      : arguments_{arguments}, shape_{shape}, weights_{weights}, spec_{arguments.plan} {}

  [[nodiscard]] Plan make() const {
    if (spec_.name == "full") return full();
    if (spec_.name == "sink_recent") return sink_recent();
    if (bits_named(spec_.name, "int") != 0) return quantized();
    if (bits_named(spec_.name, "kivi") != 0) return kivi();
    if (spec_.name == "chunk") return chunks<MeanKey>();
    if (spec_.name == "quest") return chunks<MinMaxKey>();
    if (spec_.name == "duo") {
      spec_.at_most(1);
      require(!weights_.empty() || !spec_.source.empty(), "--plan ", spec_.text,
              ": needs the gates that lie with a model's ",
              "weights; give the model, or a pattern folder as the plan");
      return duo(source_or(weights_ / "duo"), spec_.share(0, arguments_.sparsity));
    }
    if (spec_.name == "headkv") return headkv();
    if (spec_.name == "snapkv") return budgets<SnapKvScorer>();
    if (spec_.name == "adakv") return budgets<SnapKvScorer>(/*share=*/true);
    if (spec_.name == "tova") return budgets<TovaScorer>();
    if (spec_.name == "h2o") return budgets<H2oScorer>();
    if (spec_.name == "keynorm") return budgets<KeyNormScorer>();
    if (spec_.name == "pyramid") return pyramid();
    if (spec_.name == "streaming_llm") return streaming_llm();
    if (spec_.name == "search") return search();
    return from_path();
  }

 private:
  // Bytes are those of rows, as near as the smallest pages come, and queries are not counted: so do all
  // plans that are compared at equal bytes.
  [[nodiscard]] Plan search() const {
    spec_.at_most(2);
    spec_.exact_rows();
    const double share = spec_.share(0, 0.125);
    require(share > 0 && share <= 1, "--plan ", spec_.text, ": the share of the bytes is ", share,
            ", must be above 0 and at most 1");
    const std::size_t context = spec_.count(1, 4096);
    HeadKnowledge known{.weights = weights_.string()};
    if (!spec_.source.empty()) known.damage = spec_.source;
    const auto menu = search_choices(known, shape_, context);
    const CacheOptions options{.page_rows = 16};
    std::size_t queries = 0;
    for (const auto& choice : menu.choices) {
      queries = std::max(
          queries, AnyPlan<bfloat16>{shape_, choice.config}.memory(0, options).queries);
    }
    const MemoryEstimate all = AnyPlan<bfloat16>{shape_}.memory(context, options);
    const auto rows = static_cast<std::size_t>(share * static_cast<double>(all.heads));
    const auto found =
        search_plan<AnyPlan<bfloat16>>(shape_, menu.choices,
                                       {.bytes = rows + all.tail + queries,
                                        .context = context,
                                        .options = options});
    // By way of the file, which does not know the element type.
    return io::parse_plan<Plan>(io::format_plan(found.plan));
  }

  [[nodiscard]] Plan full() const {
    spec_.at_most(0);
    spec_.exact_rows();
    return Plan{shape_, typename FullCache<Dense>::Config{}};
  }

  [[nodiscard]] Plan quantized() const {
    spec_.at_most(1);
    spec_.exact_rows();
    return Plan{shape_,
                typename QuantizedResidualCache<E>::Config{
                    .storage = per_token(spec_, spec_.name, shape_, spec_.count(0, 128))}};
  }

  [[nodiscard]] Plan kivi() const {
    spec_.at_most(1);
    spec_.exact_rows();
    return kivi_plan<Plan>(shape_, {.bits = bits_named(spec_.name, "kivi"),
                                    .group = group_for(shape_),
                                    .residual = spec_.count(0, 128)});
  }

  [[nodiscard]] Plan sink_recent() const {
    spec_.at_most(2);
    const std::size_t sinks = spec_.count(0, arguments_.sinks.value_or(16));
    const std::size_t recent = spec_.count(1, arguments_.recent.value_or(128));
    if (spec_.storage.empty()) {
      return Plan{shape_,
                  typename SinkRecentCache<Dense>::Config{.sinks = sinks, .recent = recent}};
    }
    return Plan{shape_, typename SinkRecentCache<Codes>::Config{
                            .sinks = sinks, .recent = recent, .storage = codes(32)}};
  }

  template <class Summary>
  [[nodiscard]] Plan chunks() const {
    spec_.at_most(2);
    const std::size_t chunk = spec_.count(0, 16);
    const std::size_t budget = spec_.count(1, 1024);
    if (spec_.storage.empty()) {
      return Plan{shape_, typename ChunkRetrievalCache<Dense, Summary>::Config{.chunk = chunk,
                                                                               .budget = budget}};
    }
    return Plan{shape_, typename ChunkRetrievalCache<Codes, Summary>::Config{
                            .chunk = chunk, .budget = budget, .storage = codes(128)}};
  }

  [[nodiscard]] Plan duo(const fs::path& folder, double sparsity) const {
    const io::DuoPattern pattern = io::load_duo_pattern(folder);
    const DuoConfig config{.sparsity = sparsity,
                           .sinks = arguments_.sinks.value_or(pattern.sinks),
                           .recent = arguments_.recent.value_or(pattern.recent),
                           .rule = arguments_.rule};
    if (spec_.storage.empty()) return duo_plan<Plan>(shape_, pattern.gates, config);
    return quantized_duo_plan<Plan>(shape_, pattern.gates, config, codes(128));
  }

  [[nodiscard]] Plan headkv() const {
    spec_.at_most(2);
    require(!weights_.empty() || !spec_.source.empty(), "--plan ", spec_.text,
            ": needs the head scores that lie with a ",
            "model's weights; give the model, or a score file as the plan");
    HeadKvConfig config = arguments_.headkv;
    config.capacity = spec_.count(0, config.capacity);
    config.window = spec_.count(1, config.window);
    return headkv(source_or(weights_ / "headkv" / "retrieval_heads.json"), config);
  }
  [[nodiscard]] Plan headkv(const fs::path& scores, const HeadKvConfig& config) const {
    const HeadScores loaded = io::load_head_scores(scores);
    if (spec_.storage.empty()) return headkv_plan<Plan>(shape_, loaded, config);
    return quantized_headkv_plan<Plan>(shape_, loaded, config, codes(0));
  }

  // So many rows for every head, in all.
  template <class Scorer>
  [[nodiscard]] Plan budgets(bool share = false) const {
    constexpr bool votes = std::same_as<Scorer, SnapKvScorer>;
    spec_.at_most(votes ? 2 : 1);
    const std::size_t capacity = spec_.count(0, arguments_.headkv.capacity);
    const auto make = [&]<class Storage>(std::type_identity<Storage>, const auto& storage) {
      typename HeadBudgetCache<Storage, Scorer>::Config config;
      config.storage = storage;
      config.share_in_layer = share;
      if constexpr (votes) {
        config.scorer = arguments_.headkv.scorer();
        config.scorer.window = spec_.count(1, config.scorer.window);
      }
      if constexpr (std::same_as<Scorer, H2oScorer>) config.scorer.recent = capacity / 2;
      if constexpr (std::same_as<Scorer, H2oScorer> || std::same_as<Scorer, TovaScorer>) {
        config.compress_every = 1;  // as published: at each token that is decoded
        config.after_first_compress = true;
      }
      const std::size_t kept = Scorer::kept_rows(config.scorer);
      require(capacity > 0 && capacity >= kept, "--plan ", spec_.text, ": a capacity of ", capacity,
              " rows, must be at least 1 and at least the ", kept,
              " latest rows that are always kept");
      config.budget = capacity - kept;
      return Plan{shape_, config};
    };
    if constexpr (votes) {
      if (!spec_.storage.empty()) {
        return make(std::type_identity<Codes>{}, static_cast<typename Codes::Config>(codes(0)));
      }
    }
    spec_.exact_rows();
    return make(std::type_identity<Dense>{}, typename Dense::Config{});
  }

  [[nodiscard]] Plan pyramid() const {
    spec_.at_most(2);
    spec_.exact_rows();
    // Votes are counted as for HeadKV; how the rows are shared out is the method's own.
    const HeadKvConfig& votes = arguments_.headkv;
    return pyramidkv_plan<Plan>(shape_, {.capacity = spec_.count(0, votes.capacity),
                                         .window = spec_.count(1, votes.window),
                                         .pooling = votes.pooling,
                                         .kernel = votes.kernel,
                                         .compress_every = votes.compress_every});
  }

  [[nodiscard]] Plan streaming_llm() const {
    spec_.at_most(2);
    spec_.exact_rows();
    require(!weights_.empty(), "--plan ", spec_.text, ": needs to know how the model turns its ",
            "keys; give the model, or sink_recent as the plan");
    return streaming_llm_plan<Plan>(
        shape_, {.sinks = spec_.count(0, arguments_.sinks.value_or(16)),
                 .recent = spec_.count(1, arguments_.recent.value_or(128)),
                 .rotary_in_cache = reference::load_llama_config(weights_.string()).rotary});
  }

  // What is not a name is a path: a folder is a pattern, a file says itself what it is.
  [[nodiscard]] Plan from_path() const {
    const fs::path path{arguments_.plan};
    require_plan_source(arguments_.plan);
    Maker file{arguments_, shape_, weights_};
    file.spec_ = Spec{{}};  // a + or : in a path is part of it
    if (fs::is_directory(path)) return file.duo(path, arguments_.sparsity);
    const std::string text = io::read_text_file(path);
    const io::Json json = io::parse_json(text, path.string());
    if (!json.is_object() || !json.contains("format")) return file.headkv(path, arguments_.headkv);
    const Plan plan = io::parse_plan<Plan>(text, path.string());
    const ModelShape& own = plan.shape();
    require(own == shape_, path.string(), ": is a plan for ", own.layers, " layers, ", own.q_heads,
            " query heads, ", own.kv_heads, " KV heads, head_dim ", own.head_dim,
            "; the model has ", shape_.layers, ", ", shape_.q_heads, ", ", shape_.kv_heads, ", ",
            shape_.head_dim);
    return plan;
  }

  [[nodiscard]] fs::path source_or(const fs::path& beside) const {
    return spec_.source.empty() ? beside : fs::path{spec_.source};
  }

  [[nodiscard]] ResidualConfig codes(std::size_t residual) const {
    return per_token(spec_, spec_.storage, shape_, residual);
  }

  const PlanArguments& arguments_;
  const ModelShape& shape_;
  const fs::path& weights_;
  Spec spec_;
};

}  // namespace

void require_plan_source(const std::string& plan) {
  const Spec spec{plan};
  constexpr std::string_view names[]{"full",    "sink_recent", "chunk",         "quest", "duo",
                                     "headkv",  "snapkv",      "adakv",         "tova",  "h2o",
                                     "keynorm", "pyramid",     "streaming_llm", "search"};
  const bool named = std::ranges::count(names, spec.name) > 0 ||
                     bits_named(spec.name, "int") != 0 || bits_named(spec.name, "kivi") != 0;
  std::error_code ignored;
  require(named || fs::exists(plan, ignored), "--plan ", plan,
          ": is neither the name of a plan nor a file or folder. Known:\n", plan_help());
}

const char* plan_help() {
  return R"(  full                 every row, exact
  sink_recent:16,128   the first 16 rows and the latest 128
  int8 int4 int2       every row in so many bits, the latest 128 exact; int4:64 for 64
  kivi2 kivi4          the same with keys per channel (KIVI)
  chunk:16,1024        every row kept, 1,024 read, in chunks of 16, by mean key (TriForce)
  quest:16,1024        the same by smallest and largest key (Quest)
  duo:0.5              half of the heads stream, by the model's own gates (DuoAttention);
                       duo@FOLDER:0.5 by those of a pattern folder
  headkv:128           128 rows per head on average, by the model's own scores (HeadKV);
                       headkv@FILE:128 by those of a score file
  snapkv:128           128 rows of every head, those that the prompt's end looks at most (SnapKV)
  adakv:128            the same on average, the heads of a layer compete for them (Ada-KV)
  h2o:128              128 rows of every head: half by all attention so far, half the latest (H2O)
  tova:128             128 rows of every head, by the latest token's attention alone (TOVA)
  keynorm:128          128 rows of every head, those with the shortest keys
  pyramid:128          128 rows per head on average, most in the lower layers (PyramidKV)
  streaming_llm:16,128 as sink_recent, but the two seem to be neighbours (StreamingLLM)
  search:0.125,4096    an eighth of a full cache's bytes at 4,096 tokens, spent head by head over all
                       of these by what lies with the model (`plan search`), or search@damage.json
  duo+int4:0.5         and so on: +int8, +int4, +int2 quantise sink_recent, chunk, quest,
                       duo's retrieval heads and the survivors of headkv, snapkv and adakv
  FILE.json            a plan file (`plan convert` writes them), or HeadKV head scores
  FOLDER               a DuoAttention pattern: full_attention_heads.tsv and config.json
)";
}

void add_plan_options(CLI::App& app, PlanArguments& arguments) {
  app.add_option("--plan", arguments.plan, "What each KV head keeps: a name, file or folder, below")
      ->type_name("PLAN")
      ->capture_default_str();
  app.add_option("--sparsity", arguments.sparsity, "DuoAttention: share of streaming heads")
      ->capture_default_str();
  app.add_flag_callback(
      "--threshold", [&arguments] { arguments.rule = DuoRule::threshold; },
      "DuoAttention: keep every gate from the quantile on, as published, not an exact count");
  app.add_option("--sinks", arguments.sinks,
                 "DuoAttention: opening rows of streaming heads (default: as the pattern says)");
  app.add_option("--recent", arguments.recent, "DuoAttention: their latest rows (the same)");
  app.add_option("--capacity", arguments.headkv.capacity,
                 "HeadKV: rows per head on average, window included")
      ->capture_default_str();
  app.add_option("--window", arguments.headkv.window, "HeadKV: latest rows, whose queries vote")
      ->capture_default_str();
  app.add_option("--beta", arguments.headkv.beta, "HeadKV: 1 / beta of the rows go by score")
      ->capture_default_str();
}

template <Element E>
AnyPlan<E> make_plan(const PlanArguments& arguments, const ModelShape& shape,
                     const fs::path& weights) {
  shape.validate();
  return Maker<E>{arguments, shape, weights}.make();
}

template AnyPlan<float> make_plan(const PlanArguments&, const ModelShape&, const fs::path&);
template AnyPlan<half> make_plan(const PlanArguments&, const ModelShape&, const fs::path&);
template AnyPlan<bfloat16> make_plan(const PlanArguments&, const ModelShape&, const fs::path&);

}  // namespace kvpolicy::tools
