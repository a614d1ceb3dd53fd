// What stands between C++ and its callers in C: no exception goes through.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace folio {

inline thread_local std::string last_error;  // of this thread's last call that failed

// 0; or 1 where `f` throws, with last_error saying what.
template <class F>
int64_t guarded(F&& f) {
    try {
        f();
        return 0;
    } catch (const std::exception& error) {
        last_error = error.what();
    } catch (...) {
        last_error = "unknown error";
    }
    return 1;
}

}  // namespace folio
