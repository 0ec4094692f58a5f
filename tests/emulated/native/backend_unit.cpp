// The torch.distributed backend, as one translation unit.
#include "emulated.h"
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <c10/core/StreamGuard.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <fcntl.h>
#include <unistd.h>
#include <thread>

#include "work.cpp"
#include "exchange.cpp"
#include "backend.cpp"
#include "collectives.cpp"
