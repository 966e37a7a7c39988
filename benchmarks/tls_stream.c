/* What TLS costs two processes at the least: one encrypts and sends 4 GiB over loopback, one receives and decrypts, by
 * OpenSSL from C. With a buffer to read ahead (bytes; 0 for OpenSSL's own) the reader takes many records in one system
 * call, which Python's ssl cannot ask for. Prints processor seconds for a GB of each side, and GB/s.
 *
 *   cc -O2 benchmarks/tls_stream.c -o build/tls_stream -lssl -lcrypto
 *   build/tls_stream FOLDER [READ_AHEAD]     FOLDER has tls.crt and tls.key, as `kvcluster certs issue` makes them
 */
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const size_t TOTAL = 4ull << 30, CHUNK = 4 << 20, SENT = 256 << 10;

static double seconds(clockid_t clock) {
  struct timespec at;
  clock_gettime(clock, &at);
  return at.tv_sec + at.tv_nsec * 1e-9;
}

static int check(int good, const char *what) {
  if (!good) {
    fprintf(stderr, "tls_stream: %s failed\n", what);
    exit(1);
  }
  return good;
}

static void serve(int listening, const char *folder, char *data) {
  char path[4096];
  SSL_CTX *context = SSL_CTX_new(TLS_server_method());
  snprintf(path, sizeof path, "%s/tls.crt", folder);
  check(SSL_CTX_use_certificate_chain_file(context, path) == 1, path);
  snprintf(path, sizeof path, "%s/tls.key", folder);
  check(SSL_CTX_use_PrivateKey_file(context, path, SSL_FILETYPE_PEM) == 1, path);
  SSL *stream = SSL_new(context);
  SSL_set_fd(stream, accept(listening, NULL, NULL));
  check(SSL_accept(stream) == 1, "the handshake");
  double began = seconds(CLOCK_PROCESS_CPUTIME_ID);
  for (size_t sent = 0, done; sent < TOTAL; sent += done)
    check(SSL_write_ex(stream, data + sent % CHUNK, SENT, &done), "sending");
  printf("writer %.3f ", (seconds(CLOCK_PROCESS_CPUTIME_ID) - began) / TOTAL * 1e9);
}

int main(int count, char **given) {
  check(count > 1, "usage: tls_stream FOLDER [READ_AHEAD];");
  size_t ahead = count > 2 ? strtoul(given[2], NULL, 10) : 0;
  char *data = memset(malloc(CHUNK), 7, CHUNK);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof at;
  int listening = socket(AF_INET, SOCK_STREAM, 0), connected = socket(AF_INET, SOCK_STREAM, 0);
  check(!bind(listening, (void *)&at, length) && !listen(listening, 1), "listening");
  getsockname(listening, (void *)&at, &length);
  if (!fork()) {
    serve(listening, given[1], data);
    return 0;
  }
  check(!connect(connected, (void *)&at, length), "connecting");
  SSL_CTX *context = SSL_CTX_new(TLS_client_method());
  if (ahead) {
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, ahead);
  }
  SSL *stream = SSL_new(context);
  SSL_set_fd(stream, connected);
  check(SSL_connect(stream) == 1, "the handshake");
  double began = seconds(CLOCK_PROCESS_CPUTIME_ID), from = seconds(CLOCK_MONOTONIC);
  for (size_t got = 0, done; got < TOTAL; got += done)
    check(SSL_read_ex(stream, data + got % CHUNK, CHUNK - got % CHUNK, &done), "receiving");
  double took = seconds(CLOCK_MONOTONIC) - from, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - began;
  wait(NULL);
  printf("reader %.3f s/GB, %.2f GB/s, %s, %s\n", cpu / TOTAL * 1e9, TOTAL / took / 1e9, SSL_get_cipher(stream),
         OpenSSL_version(OPENSSL_VERSION));
  return 0;
}
