import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

export default defineConfig({
  base: "./",
  plugins: [react()],
  build: {
    outDir: "../src/dtruntime/dashboard/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    target: "es2022",
  },
  server: { proxy: { "/api": "http://127.0.0.1:3000" } },
  test: {
    restoreMocks: true,
    projects: [
      { extends: true, test: { name: "logic", include: ["tests/*.test.ts"], environment: "node" } },
      {
        extends: true,
        test: { name: "pages", include: ["tests/*.test.tsx"], environment: "jsdom", setupFiles: "tests/setup.ts" },
      },
    ],
  },
});
