/*
 * A chat in C: chat MODEL. Type a line, read the answer while it is generated; Ctrl-D ends.
 *
 *   cc chat.c -o chat $(kvloom gewu --cflags --libs)
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <qos/qos.h>

struct answer {
    pthread_mutex_t lock;
    pthread_cond_t done;
    int is_done;
};

/* Writes `text` as the content of a JSON string; returns the end. `out` must have room for 6 bytes per byte of `text`.
 * */
static char *escape(char *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\') {
            out += sprintf(out, "\\u%04x", (unsigned char)*text);
        } else {
            *out++ = *text;
        }
    }
    *out = '\0';
    return out;
}

/* Prints the JSON string that starts at `text`, after its quote. Escapes beyond ASCII do not occur: replies are UTF-8.
 * */
static void print_string(const char *text)
{
    for (; *text != '"' && *text != '\0'; text++) {
        if (*text != '\\') {
            putchar(*text);
        } else if (*++text == 'n') {
            putchar('\n');
        } else if (*text == 't') {
            putchar('\t');
        } else if (*text == 'u') {
            char digits[5] = {0};
            memcpy(digits, text + 1, 4);
            putchar((int)strtol(digits, NULL, 16));
            text += 4;
        } else {
            putchar(*text);
        }
    }
    fflush(stdout);
}

/* The library calls it on a thread of its own, one reply after another. */
static void on_response(void *context, const char *response)
{
    struct answer *answer = context;
    const char *content = strstr(response, "\"content\":\"");
    if (content != NULL) {
        print_string(content + strlen("\"content\":\""));
    }
    if (strstr(response, "\"finish_reason\":null") == NULL) {
        pthread_mutex_lock(&answer->lock);
        answer->is_done = 1;
        pthread_cond_signal(&answer->done);
        pthread_mutex_unlock(&answer->lock);
    }
}

static int ask(OH_QoS_GewuSession session, const char *line)
{
    static char request[6 * 4096 + 200];
    struct answer answer = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
    char *end = request + sprintf(request, "{\"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"");
    strcpy(escape(end, line), "\"}]}");
    OH_QoS_GewuSubmitRequestResult result = OH_QoS_GewuSubmitRequest(session, request, on_response, &answer);
    if (result.error != OH_QOS_GEWU_OK) {
        fprintf(stderr, "submit: %d\n", (int)result.error);
        return -1;
    }
    pthread_mutex_lock(&answer.lock);
    while (!answer.is_done) {
        pthread_cond_wait(&answer.done, &answer.lock);
    }
    pthread_mutex_unlock(&answer.lock);
    OH_QoS_GewuAbortRequest(session, result.request);  /* waits until the last callback has returned */
    putchar('\n');
    return 0;
}

int main(int argc, char **argv)
{
    char line[4096], attributes[6 * 4096 + 50];
    if (argc != 2 || strlen(argv[1]) >= sizeof line) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return 2;
    }
    strcpy(escape(attributes + sprintf(attributes, "{\"model\": \""), argv[1]), "\"}");
    OH_QoS_GewuCreateSessionResult created = OH_QoS_GewuCreateSession(attributes);
    if (created.error != OH_QOS_GEWU_OK) {
        fprintf(stderr, "create: %d\n", (int)created.error);
        return 1;
    }
    OH_QoS_SetThreadQoS(QOS_USER_INTERACTIVE);
    while (fgets(line, sizeof line, stdin) != NULL && ask(created.session, line) == 0) {
    }
    return OH_QoS_GewuDestroySession(created.session) == OH_QOS_GEWU_OK ? 0 : 1;
}
