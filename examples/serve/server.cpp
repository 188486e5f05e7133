// SPDX-License-Identifier: Apache-2.0
#include "serve/server.hpp"

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <httplib.h>

#include <kvpolicy/core/error.hpp>

#include "common/say.hpp"
#include "serve/answer_text.hpp"
#include "serve/channel.hpp"
#include "serve/demo_page.hpp"
#include "serve/http_request.hpp"

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

void set_error(httplib::Response& response, const ApiError& error) {
  set_json(response, error.status(), error.body());
}

// What failed in here is told whoever runs the server: a message may name its files.
ApiError failure(const std::string& what, const std::string& why) {
  tools::say(message("serve: ", what, " failed: ", why));
  return ApiError{500, what + " failed in the server; its standard error says why"};
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
  int pieces = 0;              // that were added to `whole`
  std::shared_ptr<void> seat;  // while the client is talked to
};

constexpr std::chrono::milliseconds tick{500};

// Why there is no answer, or no more of one.
std::optional<ApiError> error_of(const Exchange& exchange, const Outcome& outcome) {
  if (outcome.reason == FinishReason::failed) {
    return failure(message("request ", exchange.id), outcome.error);
  }
  // A client that has gone does not read this.
  if (outcome.reason == FinishReason::cancelled) return ApiError{503, "the server is stopping"};
  return std::nullopt;
}

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
    if (const auto error = error_of(exchange, *news->outcome)) {
      events += event(error->body());
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

// Sends the whole answer at its end, and white space before, by which a client that has gone is noticed. By then the status has been
// sent: where there is no answer after all, the client's connection breaks off instead of saying that there was one.
bool send_whole(const Api& api, Exchange& exchange, httplib::DataSink& sink) {
  const auto news = exchange.channel.wait(tick);
  if (!news) return write(sink, "\n");
  exchange.whole += news->text;
  if (!news->outcome) return ++exchange.pieces % 64 != 0 || write(sink, "\n");
  exchange.is_over = true;
  if (error_of(exchange, *news->outcome)) return false;
  if (!write(sink, dump(api.answer(exchange.request, exchange.id, exchange.whole, *news->outcome))))
    return false;
  sink.done();
  return true;
}

// Waits so long for a whole answer that most have a status of their own. Nothing if there is none yet.
std::optional<Outcome> soon_ended(Exchange& exchange) {
  const auto until = std::chrono::steady_clock::now() + 4 * tick;
  while (std::chrono::steady_clock::now() < until) {
    const auto news = exchange.channel.wait(tick);
    if (!news) continue;
    exchange.whole += news->text;
    if (news->outcome) {
      exchange.is_over = true;
      return news->outcome;
    }
  }
  return std::nullopt;
}

}  // namespace

Server::Server(const Api& api, Scheduler& scheduler, const ServerOptions& options)
    : api_{api},
      scheduler_{scheduler},
      options_{options},
      bodies_{options},
      http_{std::make_unique<httplib::Server>()} {
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
  http.set_keep_alive_max_count(1);
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

Stopped Server::run() {
  // Steps run in this thread, whose OpenMP settings are the caller's.
  const auto ended = std::make_shared<std::promise<void>>();
  const auto has_ended = ended->get_future();
  std::thread listening{[this, ended] {
    http_->listen_after_bind();
    ended->set_value();
  }};
  Stopped stopped;
  try {
    stopped.cut = scheduler_.run();
  } catch (...) {
    stopped.failed = std::current_exception();
    scheduler_.stop();
  }
  stopping_ = true;
  // Clients are told; then connections end by themselves, but for those whose clients send nothing, or a byte now and then.
  const auto is_ended = [&](std::chrono::milliseconds longest) {
    return has_ended.wait_for(longest) == std::future_status::ready;
  };
  const std::chrono::milliseconds soon{5};
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{2};
  while (answering_ > 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(soon);
  // The library forgets that it shall stop if it does not listen yet.
  while (!http_->is_running() && !is_ended(soon)) {
  }
  http_->stop();
  if (is_ended(std::chrono::milliseconds{2500})) {
    listening.join();
  } else {
    stopped.has_strays = true;
    listening.detach();
  }
  return stopped;
}

void Server::stop() { scheduler_.stop(); }

void Server::add_paths() {
  httplib::Server& http = *http_;
  http.Get("/health", [](const httplib::Request&, httplib::Response& response) {
    response.set_content("{\"status\":\"ok\"}", "application/json");
  });
  http.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
    set_json(response, 200, api_.models());
  });
  http.Get("/v1/models/(.+)", [this](const httplib::Request& request, httplib::Response& response) {
    set_json(response, 200, api_.model(request.matches[1]));
  });
  http.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
    response.set_content(metrics(snapshot()), "text/plain; version=0.0.4");
  });
  http.Get("/state", [this](const httplib::Request&, httplib::Response& response) {
    set_json(response, 200, state(snapshot(), api_));
  });
  if (options_.page) {
    http.Get("/", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(demo_page.data(), demo_page.size(), "text/html; charset=utf-8");
    });
  }
  const bool only_loopback = is_loopback(options_.host) || !options_.also_known_as.empty();
  http.set_pre_routing_handler(
      [this, only_loopback](const httplib::Request& request, httplib::Response& response) {
        try {
          if (stopping_) throw ApiError{503, "the server is stopping"};
          require_served(request, only_loopback, options_.also_known_as);
          return httplib::Server::HandlerResponse::Unhandled;
        } catch (const ApiError& error) {
          set_error(response, error);
          return httplib::Server::HandlerResponse::Handled;
        }
      });
  const auto post = [this](const char* path, bool chat) {
    http_->Post(path, [this, chat](const httplib::Request& request, httplib::Response& response,
                                   const httplib::ContentReader& reader) {
      try {
        answer(bodies_.read(request, reader, stopping_), chat, response);
      } catch (const QueueFull& error) {
        response.set_header("Retry-After", "1");
        set_error(response, ApiError{429, error.what(), {}, "rate_limit_exceeded"});
      } catch (const Stopping& error) {
        set_error(response, ApiError{503, error.what()});
      } catch (const CapacityError& error) {
        set_error(response,
                  ApiError{400, error.what(), chat ? "messages" : "prompt", "context_length_exceeded"});
      } catch (const ConfigError& error) {
        set_error(response, ApiError{400, error.what()});
      }
    });
  };
  post(completions_path, false);
  post(chat_completions_path, true);
  http.set_exception_handler(
      [](const httplib::Request& request, httplib::Response& response, std::exception_ptr error) {
        const std::string what = request.method.substr(0, 20) + " " + request.path.substr(0, 100);
        try {
          std::rethrow_exception(error);
        } catch (const ApiError& one) {
          set_error(response, one);
        } catch (const std::exception& one) {
          set_error(response, failure(what, one.what()));
        } catch (...) {
          set_error(response, failure(what, "unknown error"));
        }
      });
  http.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;
    const int status = response.status;
    const char* text =
        status == 404 ? "there is nothing at this path; see /v1/models" : "the request cannot be read";
    set_error(response, ApiError{status, std::string{text} + ": " + request.path.substr(0, 100)});
  });
}

Snapshot Server::snapshot() const {
  Snapshot all = scheduler_.snapshot();
  all.counters.refused += refused_;
  return all;
}

void Server::answer(Body body, bool chat, httplib::Response& response) {
  // Requests that are read, and answers that nobody fetches, have threads too.
  const std::size_t before = answering_++;
  std::shared_ptr<void> seat{nullptr, [this](void*) { --answering_; }};
  if (before >= options_.connections - reserve) {
    ++refused_;
    throw QueueFull(message(before, " requests are being answered, no more are taken; try again later"));
  }
  const auto exchange = std::make_shared<Exchange>();
  {
    const Body own{std::move(body)};  // may be large, and is not needed while it is answered
    exchange->request = chat ? api_.chat(own.text()) : api_.completion(own.text());
  }
  if (stopping_) throw Stopping("the server is stopping");
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
  if (!wanted.stream) {
    if (const auto outcome = soon_ended(*exchange)) {
      if (const auto error = error_of(*exchange, *outcome)) throw ApiError{*error};
      const std::string text = dump(api_.answer(wanted, exchange->id, exchange->whole, *outcome));
      response.set_content_provider(
          text.size(), "application/json",
          [text](std::size_t offset, std::size_t length, httplib::DataSink& sink) {
            return sink.write(text.data() + offset, length);
          },
          [seat](bool) {});
      return;
    }
  }
  const auto provide = [this, exchange](std::size_t, httplib::DataSink& sink) {
    try {
      return exchange->request.stream ? send_stream(api_, *exchange, sink)
                                      : send_whole(api_, *exchange, sink);
    } catch (const std::exception& error) {
      static_cast<void>(failure(message("request ", exchange->id), error.what()));
      return false;  // the connection breaks off
    }
  };
  exchange->seat = std::move(seat);
  const auto release = [this, exchange](bool) {
    // Before the request is seen to have ended, which says that there is room.
    exchange->seat.reset();
    if (!exchange->is_over) scheduler_.cancel(exchange->id);
  };
  response.set_chunked_content_provider(wanted.stream ? "text/event-stream" : "application/json", provide,
                                        release);
}

}  // namespace kvpolicy::serve
