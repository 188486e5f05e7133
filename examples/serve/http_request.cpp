// SPDX-License-Identifier: Apache-2.0
#include "serve/http_request.hpp"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

#include <httplib.h>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::serve {
namespace {

// The name in "name:port", in lower case; an address of IPv6 is in brackets where a port may follow.
std::string name_of_host(std::string_view host) {
  const bool is_bare_address = !host.starts_with('[') && std::ranges::count(host, ':') > 1;
  const std::size_t end = is_bare_address         ? host.size()
                          : host.starts_with('[') ? std::min(host.find(']'), host.size() - 1) + 1
                                                  : host.find(':');
  std::string name{host.substr(0, end)};
  std::ranges::transform(name, name.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; });
  return name;
}

// Whether "http://name:port" is a page of this server: by its Host, whether that says the scheme's port or not, or by a name of
// its own, which a proxy in front of it need not pass on.
bool is_own_page(std::string_view origin, std::string_view host, const std::vector<std::string>& hosts) {
  for (const auto& [scheme, port] : {std::pair{"http://", ":80"}, {"https://", ":443"}}) {
    if (!origin.starts_with(scheme)) continue;
    const auto without_port = [own = std::string_view{port}](std::string_view text) {
      if (text.ends_with(own)) text.remove_suffix(own.size());
      return text;
    };
    const std::string_view site = origin.substr(std::string_view{scheme}.size());
    return (!host.empty() && without_port(site) == without_port(host)) ||
           std::ranges::any_of(
               hosts, [&](const std::string& one) { return name_of_host(one) == name_of_host(site); });
  }
  return false;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

bool is_loopback(const std::string& host) {
  const std::string name = name_of_host(host);
  return name == "localhost" || name == "[::1]" || name == "::1" ||
         (name.starts_with("127.") && name.find_first_not_of("0123456789.") == std::string::npos);
}

void require_served(const httplib::Request& request, bool only_loopback,
                    const std::vector<std::string>& hosts) {
  const std::string host = request.get_header_value("Host");
  const bool is_known = std::ranges::any_of(
      hosts, [&](const std::string& one) { return name_of_host(one) == name_of_host(host); });
  if (only_loopback && !host.empty() && !is_loopback(host) && !is_known) {
    throw ApiError{403, message("this server is not known as ", host.substr(0, 100),
                                "; whoever runs it may say so (--also-known-as)")};
  }
  // Pages of other sites may send forms and plain text, which need no permission of this server.
  const std::string origin = request.get_header_value("Origin");
  if (request.has_header("Origin") && !is_own_page(origin, host, hosts)) {
    throw ApiError{403, message("a page of ", origin.substr(0, 100),
                                " may not ask this server; whoever runs it may say so (--also-known-as)")};
  }
  const std::string length = request.get_header_value("Content-Length");
  const bool has_length = request.has_header("Content-Length");
  if (has_length && (request.get_header_value_count("Content-Length") > 1 || !is_number(length))) {
    throw ApiError{400, "the request must have one Content-Length, a whole number"};
  }
  const bool has_body = (has_length && length.find_first_not_of('0') != std::string::npos) ||
                        request.has_header("Transfer-Encoding");
  const bool asks = request.method == "GET" || request.method == "HEAD" || request.method == "OPTIONS";
  if (asks && has_body) throw ApiError{400, message("a request with ", request.method, " has no body here")};
  const bool is_read =
      request.method == "POST" && (request.path == completions_path || request.path == chat_completions_path);
  if (!asks && !is_read) {
    throw ApiError{404, message("nobody takes this with ", request.method.substr(0, 20), ": ",
                                request.path.substr(0, 100))};
  }
}

Body BodyReader::read(const httplib::Request& request, const httplib::ContentReader& reader,
                      const std::atomic<bool>& stopping) {
  if (!request.has_header("Content-Length") || request.has_header("Transfer-Encoding")) {
    throw ApiError{411, "the request must have a Content-Length, and a body of JSON that is not in chunks"};
  }
  const bool is_plain =
      !request.has_header("Content-Encoding") || request.get_header_value("Content-Encoding") == "identity";
  if (!is_plain || request.is_multipart_form_data()) {
    throw ApiError{415, "the body must be JSON, neither compressed nor a form"};
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{limits_.seconds_to_read};
  Body body{bytes_};
  std::size_t size = 0;
  bool is_late = false;
  bool is_crowded = false;
  const bool came = reader([&](const char* data, std::size_t count) {
    size += count;
    is_crowded = is_crowded || bytes_ + count > most_bytes();
    // What is too long is read to its end all the same, because a client that still sends would not read an answer.
    if (size <= limits_.max_body && !is_crowded) {
      body.append({data, count});
    }
    is_late = std::chrono::steady_clock::now() > until;
    return !is_late && !stopping;
  });
  if (stopping) throw ApiError{503, "the server is stopping"};
  if (is_late) {
    throw ApiError{408, message("the body did not come within ", limits_.seconds_to_read,
                                " seconds (--seconds-to-read)")};
  }
  if (size > limits_.max_body) {
    throw ApiError{
        413, message("the body is larger than this server takes, ", limits_.max_body, " bytes (--max-body)")};
  }
  if (is_crowded) throw ApiError{503, "too many large requests are on their way; try again later"};
  if (!came) throw ApiError{400, "the body did not come to its end"};
  return body;
}

}  // namespace kvpolicy::serve
