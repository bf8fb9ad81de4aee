// Runs the demo of spec gewu 3 (demo.cpp, unchanged): demo_main [TIMES].
#include <cstdio>
#include <cstdlib>

int Demo(void);

int main(int argc, char **argv)
{
    int times = argc > 1 ? std::atoi(argv[1]) : 1;
    for (int i = 0; i < times; i++) {
        int code = Demo();
        if (code != 0) {
            std::fprintf(stderr, "run %d returned %d\n", i, code);
            return 1;
        }
    }
    return 0;
}
