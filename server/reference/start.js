// Swagger UI over this server's own schema. No validator is asked: it would be somebody else's server.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
});
