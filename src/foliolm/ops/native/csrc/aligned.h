// Vectors that begin a line of memory.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace folio {

// malloc gives 16 bytes' alignment: a vector of 64 bytes then lies across two lines, which costs a load or a store twice,
// and of those that were asked for in time the second one was not.
template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, LINE); }
    template <class U>
    bool operator==(const LineAllocator<U>&) const {
        return true;
    }
};

template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

}  // namespace folio
