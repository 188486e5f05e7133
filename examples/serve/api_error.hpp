// SPDX-License-Identifier: Apache-2.0
//
// Why a request is not served, as OpenAI's clients are told.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

namespace kvpolicy::serve {

/// A request that cannot be served, with the status of its answer.
class ApiError : public std::runtime_error {
 public:
  /// `param`: the member of the request that is at fault; `code`: OpenAI's word for the reason, by which programs tell reasons apart.
  ApiError(int status, const std::string& text, std::string param = {}, std::string code = {})
      : std::runtime_error{text}, status_{status}, param_{std::move(param)}, code_{std::move(code)} {}
  [[nodiscard]] int status() const { return status_; }
  /// {"error": {...}}
  [[nodiscard]] nlohmann::json body() const {
    const auto or_null = [](const std::string& text) {
      return text.empty() ? nlohmann::json{} : nlohmann::json(text);
    };
    const char* type = status_ == 429   ? "rate_limit_error"
                       : status_ >= 500 ? "server_error"
                                        : "invalid_request_error";
    return {{"error",
             {{"message", what()}, {"type", type}, {"param", or_null(param_)}, {"code", or_null(code_)}}}};
  }

 private:
  int status_;
  std::string param_;
  std::string code_;
};

}  // namespace kvpolicy::serve
