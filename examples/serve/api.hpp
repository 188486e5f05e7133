// SPDX-License-Identifier: Apache-2.0
//
// OpenAI's interface in JSON: what a request asks for, and what an answer looks like. Nothing here knows of HTTP.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include <reference_model/sampler.hpp>
#include <reference_model/tokenizer/chat_template.hpp>

#include "common/text_model.hpp"
#include "serve/api_error.hpp"
#include "serve/request_json.hpp"
#include "serve/scheduler.hpp"

namespace kvpolicy::serve {

/// What a client asks for.
struct ApiRequest {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;  ///< at the end of a stream
  std::vector<int> prompt;
  std::vector<std::size_t> marks;
  std::size_t max_new = 0;
  reference::SamplerConfig sampler;
  std::vector<std::string> stops;
  std::string plan_name;
  std::shared_ptr<const Plan> plan;
};

/// Reads requests for one model. Thread-safe.
class Api {
 public:
  /// `plan`: the name of the plan of requests that name none. The model must outlive it.
  /// @throws ConfigError if that plan cannot be made
  Api(const tools::TextModel& model, const ServedModel& served, std::string name, std::string folder,
      const std::string& plan);

  /// @throws ApiError
  [[nodiscard]] ApiRequest completion(const std::string& body) const;
  [[nodiscard]] ApiRequest chat(const std::string& body) const;

  [[nodiscard]] nlohmann::json models() const;
  /// @throws ApiError for a name that is not the model's
  [[nodiscard]] nlohmann::json model(const std::string& name) const;
  [[nodiscard]] const std::string& model_name() const { return name_; }
  /// Whether the model has a chat template.
  [[nodiscard]] bool can_chat() const { return chat_.has_value(); }
  [[nodiscard]] const reference::Tokenizer& tokenizer() const { return model_.tokenizer(); }
  [[nodiscard]] std::shared_ptr<const Plan> default_plan() const { return plan_named(default_plan_); }

  /// One answer as a whole.
  [[nodiscard]] nlohmann::json answer(const ApiRequest& request, std::uint64_t id, const std::string& text,
                                      const Outcome& outcome) const;
  /// A piece of a stream; `outcome` with the last one.
  [[nodiscard]] nlohmann::json piece(const ApiRequest& request, std::uint64_t id, const std::string& text,
                                     bool is_first, const Outcome* outcome) const;
  /// The last piece of a stream that tells what was used.
  [[nodiscard]] nlohmann::json usage_piece(const ApiRequest& request, std::uint64_t id,
                                           const Outcome& outcome) const;

 private:
  [[nodiscard]] std::shared_ptr<const Plan> make_plan(const std::string& name) const;
  [[nodiscard]] std::shared_ptr<const Plan> plan_named(const std::string& name) const;
  void read_settings(const RequestJson& body, ApiRequest& request) const;
  void set_most_new(const RequestJson& body, ApiRequest& request) const;
  [[nodiscard]] nlohmann::json head(const ApiRequest& request, std::uint64_t id, bool is_piece) const;

  const tools::TextModel& model_;
  const ServedModel& served_;
  std::string name_;
  std::string folder_;
  std::string default_plan_;
  std::optional<reference::ChatTemplate> chat_;
  std::string no_chat_;  // why there is no template
  // Reading a request takes many times its size, so that only some are read at a time.
  static constexpr int read_at_once = 4;
  mutable std::counting_semaphore<read_at_once> places_{read_at_once};
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::string, std::shared_ptr<const Plan>> plans_;
};

/// All that Prometheus is told.
[[nodiscard]] std::string metrics(const Snapshot& snapshot);
/// All that the page shows.
[[nodiscard]] nlohmann::json state(const Snapshot& snapshot, const Api& api);

}  // namespace kvpolicy::serve
