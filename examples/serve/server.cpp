// SPDX-License-Identifier: Apache-2.0
#include "serve/server.hpp"

#include <chrono>
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

void set_json(httplib::Response& response, int status, const nlohmann::json& body) {
  response.status = status;
  // Bytes of a broken text become U+FFFD instead of an exception.
  response.set_content(body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                       "application/json");
}

std::string dump(const nlohmann::json& body) {
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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
  httplib::Server& http = *http_;
  http.new_task_queue = [count = options.connections] { return new httplib::ThreadPool(count); };
  http.set_payload_max_length(options.max_body);
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
  scheduler_.run();
  http_->stop();
  listening.join();
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
    response.set_content(metrics(scheduler_.snapshot()), "text/plain; version=0.0.4");
  });
  http.Get("/state", [this](const httplib::Request&, httplib::Response& response) {
    set_json(response, 200, state(scheduler_.snapshot(), api_.model_name()));
  });
  if (options_.page) {
    http.Get("/", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(demo_page.data(), demo_page.size(), "text/html; charset=utf-8");
    });
  }
  const auto post = [this](const char* path, bool chat) {
    http_->Post(path, [this, chat](const httplib::Request& request, httplib::Response& response) {
      try {
        answer(request.body, chat, response);
      } catch (const ApiError& error) {
        set_json(response, error.status(), error.body());
      } catch (const QueueFull& error) {
        response.set_header("Retry-After", "1");
        set_json(response, 429, ApiError{429, error.what()}.body());
      } catch (const Error& error) {
        set_json(response, 400, ApiError{400, error.what()}.body());
      }
    });
  };
  post("/v1/completions", false);
  post("/v1/chat/completions", true);
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
    if (!response.body.empty()) return;
    const int status = response.status;
    const char* text = status == 413   ? "the body is larger than this server takes (--max-body)"
                       : status == 404 ? "there is nothing at this path; see /v1/models"
                                       : "the request cannot be read";
    set_json(response, status,
             ApiError{status, std::string{text} + ": " + request.path.substr(0, 100)}.body());
  });
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
  exchange->id = scheduler_.submit(std::move(request));
  const auto provide = [this, exchange](std::size_t, httplib::DataSink& sink) {
    return exchange->request.stream ? send_stream(api_, *exchange, sink) : send_whole(api_, *exchange, sink);
  };
  const auto release = [this, exchange](bool) {
    if (!exchange->is_over) scheduler_.cancel(exchange->id);
  };
  response.set_chunked_content_provider(wanted.stream ? "text/event-stream" : "application/json", provide,
                                        release);
}

}  // namespace kvpolicy::serve
