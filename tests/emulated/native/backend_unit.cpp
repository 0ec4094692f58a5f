// What needs all of torch's headers, as one translation unit: the torch.distributed backend, and autocast.
#include "emulated.h"
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <ATen/autocast_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/library.h>
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
#include "autocast.cpp"
