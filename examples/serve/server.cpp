// SPDX-License-Identifier: Apache-2.0
#include "serve/server.hpp"

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <httplib.h>

#include <kvpolicy/core/error.hpp>

#include "serve/answer_text.hpp"
#include "serve/channel.hpp"
#include "serve/demo_page.hpp"

namespace kvpolicy::serve {

namespace {

// Bytes of a broken text become U+FFFD instead of an exception.
std::string dump(const nlohmann::json& body) {
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void set_json(httplib::Response& response, int status, const nlohmann::json& body) {
  response.status = status;
  response.set_content(dump(body), "application/json");
}

// The same, and the connection ends: what it still sends of this request must not be read as the next one. The library
// closes a connection whose answer could not be sent as a whole, and without a length the end of the answer is that of
// the connection.
void set_json_and_close(httplib::Response& response, const ApiError& error) {
  response.status = error.status();
  response.set_header("Connection", "close");
  response.set_content_provider("application/json",
                                [text = dump(error.body())](std::size_t, httplib::DataSink& sink) {
                                  sink.write(text.data(), text.size());
                                  return false;
                                });
}

// A request's body. The library limits the time between two parts of it, and a client that sends a byte now and then
// would have its thread for ever. A body in chunks or compressed would be parts of which nothing is seen here.
// @throws ApiError if the body is too long, or does not come in time
std::string read_body(const httplib::Request& request, const httplib::ContentReader& reader,
                      const ServerOptions& options) {
  if (!request.has_header("Content-Length") || request.has_header("Transfer-Encoding")) {
    throw ApiError{411, "the request must have a Content-Length, and a body of JSON that is not in chunks"};
  }
  if (request.has_header("Content-Encoding") || request.is_multipart_form_data()) {
    throw ApiError{415, "the body must be JSON, neither compressed nor a form"};
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{options.seconds_to_read};
  std::string body;
  std::size_t size = 0;
  bool is_late = false;
  const bool came = reader([&](const char* data, std::size_t count) {
    size += count;
    // What is too long is read to its end all the same, because a client that still sends would not read an answer.
    if (size <= options.max_body) body.append(data, count);
    is_late = std::chrono::steady_clock::now() > until;
    return !is_late;
  });
  if (is_late) {
    throw ApiError{408, message("the body did not come within ", options.seconds_to_read,
                                " seconds (--seconds-to-read)")};
  }
  if (size > options.max_body) {
    throw ApiError{
        413, message("the body is larger than this server takes, ", options.max_body, " bytes (--max-body)")};
  }
  if (!came) throw ApiError{400, "the body did not come to its end"};
  return body;
}

// One request on its way, shared by the thread that steps and the one that talks to the client.
struct Exchange {
  ApiRequest request;
  Channel channel;
  std::optional<AnswerText> text;  // the stepping thread's
  std::uint64_t id = 0;
  // What follows is the talking thread's.
  std::string whole;
  bool is_first = true;
  bool is_over = false;
  int quiet = 0;  // times that nothing was new
};

constexpr const char* completions_path = "/v1/completions";
constexpr const char* chat_completions_path = "/v1/chat/completions";
constexpr std::chrono::milliseconds tick{500};

bool write(httplib::DataSink& sink, const std::string& text) {
  return sink.is_writable() && sink.write(text.data(), text.size());
}

// Sends what is new of a stream. False if the client has gone.
bool send_stream(const Api& api, Exchange& exchange, httplib::DataSink& sink) {
  const auto news = exchange.channel.wait(tick);
  // A comment, by which a client that has gone is noticed.
  if (!news) return write(sink, ": waiting\n\n");
  const auto event = [](const nlohmann::json& body) { return "data: " + dump(body) + "\n\n"; };
  std::string events;
  if (!news->text.empty() || exchange.is_first) {
    events += event(api.piece(exchange.request, exchange.id, news->text, exchange.is_first, nullptr));
    exchange.is_first = false;
  }
  if (news->outcome) {
    if (news->outcome->reason == FinishReason::failed) {
      events += event(ApiError{500, news->outcome->error}.body());
    } else {
      events += event(api.piece(exchange.request, exchange.id, "", false, &*news->outcome));
      if (exchange.request.include_usage) {
        events += event(api.usage_piece(exchange.request, exchange.id, *news->outcome));
      }
    }
    events += "data: [DONE]\n\n";
    exchange.is_over = true;
  }
  if (!write(sink, events)) return false;
  if (exchange.is_over) sink.done();
  return true;
}

// Sends the whole answer at its end, and white space before, by which a client that has gone is noticed.
bool send_whole(const Api& api, Exchange& exchange, httplib::DataSink& sink) {
  const auto news = exchange.channel.wait(tick);
  if (!news) return ++exchange.quiet < 4 ? sink.is_writable() : write(sink, "\n");
  exchange.whole += news->text;
  if (!news->outcome) return ++exchange.quiet % 64 != 0 || write(sink, "\n");
  const Outcome& outcome = *news->outcome;
  const nlohmann::json body = outcome.reason == FinishReason::failed
                                  ? ApiError{500, outcome.error}.body()
                                  : api.answer(exchange.request, exchange.id, exchange.whole, outcome);
  exchange.is_over = true;
  if (!write(sink, dump(body))) return false;
  sink.done();
  return true;
}

}  // namespace

Server::Server(const Api& api, Scheduler& scheduler, const ServerOptions& options)
    : api_{api}, scheduler_{scheduler}, options_{options}, http_{std::make_unique<httplib::Server>()} {
  const SchedulerOptions& limits = scheduler.options();
  const std::size_t least = limits.max_running + limits.max_waiting + reserve;
  if (options.connections == 0) options_.connections = least;
  require(options_.connections >= least, "server: connections is ", options_.connections,
          ", must be at least ", least, ": max_running ", limits.max_running, ", max_waiting ",
          limits.max_waiting, " and ", reserve, " that refuse requests and answer /health; or leave it out");
  require(options_.connections <= most_connections, "server: connections is ", options_.connections,
          ", must be at most ", most_connections, ", because each has a thread; lower max_waiting");
  httplib::Server& http = *http_;
  http.new_task_queue = [count = options_.connections] { return new httplib::ThreadPool(count); };
  http.set_read_timeout(5);
  http.set_write_timeout(options.seconds_to_write);
  http.set_keep_alive_timeout(2);
  http.set_tcp_nodelay(true);
  // The default lets two servers share a port, and each would get some of the requests.
  socket_t listening = INVALID_SOCKET;
  http.set_socket_options([&listening](socket_t socket) {
    const int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    listening = socket;
  });
  add_paths();
  const bool bound = options.port == 0 ? (port_ = http.bind_to_any_port(options.host)) > 0
                                       : http.bind_to_port(options.host, port_ = options.port);
  if (!bound) {
    throw StorageError(message("cannot listen on ", options.host, ":", options.port,
                               "; another program may use the port: choose one with --port, or 0 for any"));
  }
  // The library lets five connections wait until they are accepted; a crowd that comes at once would be reset.
  ::listen(listening, SOMAXCONN);
  http.set_socket_options([](socket_t) {});
}

Server::~Server() = default;

void Server::run() {
  // Steps run in this thread, whose OpenMP settings are the caller's.
  std::thread listening{[this] { http_->listen_after_bind(); }};
  std::exception_ptr failed;
  try {
    scheduler_.run();
  } catch (...) {
    failed = std::current_exception();
    scheduler_.stop();
  }
  http_->stop();
  listening.join();
  if (failed != nullptr) std::rethrow_exception(failed);
}

void Server::stop() {
  scheduler_.stop();
  http_->stop();
}

void Server::add_paths() {
  httplib::Server& http = *http_;
  http.Get("/health", [](const httplib::Request&, httplib::Response& response) {
    response.set_content("{\"status\":\"ok\"}", "application/json");
  });
  http.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
    set_json(response, 200, api_.models());
  });
  http.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
    response.set_content(metrics(snapshot()), "text/plain; version=0.0.4");
  });
  http.Get("/state", [this](const httplib::Request&, httplib::Response& response) {
    set_json(response, 200, state(snapshot(), api_.model_name()));
  });
  if (options_.page) {
    http.Get("/", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(demo_page.data(), demo_page.size(), "text/html; charset=utf-8");
    });
  }
  // Only the handlers below limit what they read of a body: any other request that would have one ends here.
  http.set_pre_routing_handler([](const httplib::Request& request, httplib::Response& response) {
    const bool has_no_body =
        request.method == "GET" || request.method == "HEAD" || request.method == "OPTIONS";
    const bool is_read = request.method == "POST" &&
                         (request.path == completions_path || request.path == chat_completions_path);
    if (has_no_body || is_read) return httplib::Server::HandlerResponse::Unhandled;
    set_json_and_close(response,
                       ApiError{404, message("nobody takes this with ", request.method.substr(0, 20), ": ",
                                             request.path.substr(0, 100))});
    return httplib::Server::HandlerResponse::Handled;
  });
  const auto post = [this](const char* path, bool chat) {
    http_->Post(path, [this, chat](const httplib::Request& request, httplib::Response& response,
                                   const httplib::ContentReader& reader) {
      std::string body;
      try {
        body = read_body(request, reader, options_);
      } catch (const ApiError& error) {
        set_json_and_close(response, error);
        return;
      }
      try {
        answer(body, chat, response);
      } catch (const ApiError& error) {
        set_json(response, error.status(), error.body());
      } catch (const QueueFull& error) {
        // A refused client keeps no thread of the reserve.
        response.set_header("Retry-After", "1");
        set_json_and_close(response, ApiError{429, error.what()});
      } catch (const Error& error) {
        set_json(response, 400, ApiError{400, error.what()}.body());
      }
    });
  };
  post(completions_path, false);
  post(chat_completions_path, true);
  http.set_exception_handler(
      [](const httplib::Request&, httplib::Response& response, std::exception_ptr error) {
        try {
          std::rethrow_exception(error);
        } catch (const std::exception& one) {
          set_json(response, 500, ApiError{500, one.what()}.body());
        } catch (...) {
          set_json(response, 500, ApiError{500, "unknown error"}.body());
        }
      });
  http.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty() || response.has_header("Connection")) return;
    const int status = response.status;
    const char* text =
        status == 404 ? "there is nothing at this path; see /v1/models" : "the request cannot be read";
    set_json(response, status,
             ApiError{status, std::string{text} + ": " + request.path.substr(0, 100)}.body());
  });
}

Snapshot Server::snapshot() const {
  Snapshot all = scheduler_.snapshot();
  all.counters.refused += refused_;
  return all;
}

void Server::answer(const std::string& body, bool chat, httplib::Response& response) {
  const auto exchange = std::make_shared<Exchange>();
  exchange->request = chat ? api_.chat(body) : api_.completion(body);
  const ApiRequest& wanted = exchange->request;
  exchange->text.emplace(api_.tokenizer(), wanted.stops, wanted.prompt);
  Request request;
  request.prompt = wanted.prompt;
  request.marks = wanted.marks;
  request.max_new = wanted.max_new;
  request.sampler = wanted.sampler;
  request.plan_name = wanted.plan_name;
  request.plan = wanted.plan;
  request.on_token = [exchange](int token) {
    if (const std::string text = exchange->text->add(token); !text.empty()) exchange->channel.say(text);
    return !exchange->text->stopped();
  };
  request.on_end = [exchange](const Outcome& outcome) {
    if (const std::string text = exchange->text->finish(); !text.empty()) exchange->channel.say(text);
    exchange->channel.end(outcome);
  };
  // Answers that nobody fetches have threads too, though the scheduler is done with them.
  const std::size_t before = answering_++;
  const std::shared_ptr<void> seat{nullptr, [this](void*) { --answering_; }};
  if (before >= options_.connections - reserve) {
    ++refused_;
    throw QueueFull(message(before, " requests are being answered, no more are taken; try again later"));
  }
  exchange->id = scheduler_.submit(std::move(request));
  const auto provide = [this, exchange](std::size_t, httplib::DataSink& sink) {
    return exchange->request.stream ? send_stream(api_, *exchange, sink) : send_whole(api_, *exchange, sink);
  };
  const auto release = [this, exchange, seat](bool) {
    if (!exchange->is_over) scheduler_.cancel(exchange->id);
  };
  response.set_chunked_content_provider(wanted.stream ? "text/event-stream" : "application/json", provide,
                                        release);
}

}  // namespace kvpolicy::serve
