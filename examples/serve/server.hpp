// SPDX-License-Identifier: Apache-2.0
//
// The HTTP server: OpenAI's paths, health, metrics, and a page that shows what goes on.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "serve/api.hpp"
#include "serve/http_request.hpp"
#include "serve/scheduler.hpp"

namespace httplib {
class Server;
struct Response;
}  // namespace httplib

namespace kvpolicy::serve {

struct ServerOptions : BodyLimits {
  std::string host = "127.0.0.1";
  int port = 8080;  ///< 0: any that is free
  std::size_t connections =
      0;  ///< that are served at once; others wait. 0: what the scheduler takes, and a reserve
  int seconds_to_write = 10;  ///< for which a reader may take nothing
  bool page = false;          ///< whether GET / shows the page
  /// Names by which clients may call a server that listens on the loopback address, besides that address's own.
  std::vector<std::string> also_known_as;
};

/// What became of a server.
struct Stopped {
  std::size_t cut = 0;        ///< requests that had not been answered
  std::exception_ptr failed;  ///< what Scheduler::run threw
  /// A connection keeps its thread, which looks at the server and all that it was made of until the program ends: none of them may
  /// be destroyed.
  bool has_strays = false;
};

/// Takes requests in threads of its own; `run` steps them in its caller's. A connection has one request, so that nothing that
/// follows it can be taken for another one, and a thread for as long as that takes. So there are more threads than the
/// scheduler takes requests: the others refuse requests, and answer /health and /metrics, however full the queue is.
class Server {
 public:
  /// Connections beyond what the scheduler takes.
  static constexpr std::size_t reserve = 64;
  static constexpr std::size_t most_connections = 10'000;

  /// Listens at once. All must outlive it.
  /// @throws StorageError if the port cannot be had; ConfigError if there are fewer connections than the scheduler's
  /// max_running, its max_waiting and the reserve, or more than `most_connections`
  Server(const Api& api, Scheduler& scheduler, const ServerOptions& options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  [[nodiscard]] int port() const { return port_; }
  /// Serves until `stop`; returns within five seconds of it, and of the step of the model that runs.
  Stopped run();
  /// Ends every request, at any time, also before `run`. Can be called from a signal's thread, not from its handler.
  void stop();

 private:
  void add_paths();
  [[nodiscard]] Snapshot snapshot() const;
  void answer(Body body, bool chat, httplib::Response& response);

  const Api& api_;
  Scheduler& scheduler_;
  ServerOptions options_;
  BodyReader bodies_;
  std::unique_ptr<httplib::Server> http_;
  int port_ = 0;
  std::atomic<std::size_t> refused_ = 0;    // before the scheduler was asked
  std::atomic<std::size_t> answering_ = 0;  // requests whose clients have not got all yet
  std::atomic<bool> stopping_ = false;
};

}  // namespace kvpolicy::serve
