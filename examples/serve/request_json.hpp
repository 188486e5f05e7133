// SPDX-License-Identifier: Apache-2.0
//
// JSON that a client sends: read by one reader with limits, and then member by member. Each error is an ApiError with status 400
// that names the member. A member that is null is one that is missing.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <kvpolicy/io/json_text.hpp>

#include "serve/api_error.hpp"

namespace kvpolicy::serve {

/// Templates print the members of tools and messages in the order in which a client wrote them.
using RequestJson = io::OrderedJson;

/// What a body may take, and the texts of JSON in it together with it. The schema of a tool may nest; a prompt may be a list of a
/// million tokens.
inline constexpr io::JsonLimits body_limits{.deepest = 64,
                                            .most_values = std::size_t{1} << 20,
                                            .most_keys = 512,
                                            .most_bytes = std::size_t{32} << 20};

/// Takes what it needs off the limits. `where`: what the text is; `param`: the member that it is of. @throws ApiError for what is not
/// an object of JSON
[[nodiscard]] RequestJson read_object(std::string_view text, io::JsonLimits& limits,
                                      const std::string& where = "the body", const std::string& param = {});

/// A member, or null.
[[nodiscard]] const RequestJson& member(const RequestJson& object, std::string_view name);
[[nodiscard]] std::optional<double> number(const RequestJson& object, const std::string& name, double least,
                                           double most);
[[nodiscard]] std::optional<std::size_t> count(const RequestJson& object, const std::string& name,
                                               std::size_t least);
[[nodiscard]] bool flag(const RequestJson& object, const std::string& name);

/// Refuses members that are not null and not among those. `where`: what the object is, for example "messages[2].content[0]".
void refuse_others(const RequestJson& object, const std::string& where, const std::string& param,
                   std::span<const std::string_view> known);

}  // namespace kvpolicy::serve
